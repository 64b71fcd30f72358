"""`Unframed`: answers of unknown length to HTTP/1.0, which knows no chunks: they end where the connection does."""

from __future__ import annotations

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


class Unframed:
    """In place of a cycle's own `send`, which frames what has no length in chunks."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._framed_send = cycle.send
        self._framed = False

    async def send(self, message: Message) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._framed = any(name.lower() == b"content-length" for name, _ in message["headers"])
        if self._framed:
            await self._framed_send(message)  # type: ignore[arg-type]
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            self._write(message)

    def _write(self, message: Message) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            cycle.response_started = True
            headers = [*message["headers"], (b"connection", b"close")]
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            cycle.transport.write(STATUS_LINE[message["status"]] + lines + b"\r\n")
            return
        if body := message.get("body", b""):
            cycle.transport.write(body)
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()
