"""`run_while_wanted`: a request whose client has left, or whose time is up, is not worked on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.server.errors import ApiError, error_response


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request must have been answered."""

    at: float  # of the event loop's clock
    seconds: float  # since the request came

    def error(self) -> ApiError:
        message = (
            f"there was no whole answer within {self.seconds:g} s (--request-timeout); ask for fewer tokens"
        )
        return ApiError(504, message, kind="timeout_error", code="request_timeout")


async def run_while_wanted(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, deadline: Deadline | None
) -> None:
    """`app`, cancelled wherever it is once the client leaves, or its time is up before it has begun to answer."""
    connection = _Connection(receive, send)
    connection.watch(scope["method"], deadline)
    try:
        await app(scope, connection.receive, connection.send)
    except asyncio.CancelledError:
        if not (connection.lost or connection.timed_out):
            raise  # somebody else's cancellation
        connection.task.uncancel()
        if deadline is not None and connection.timed_out:
            await error_response(deadline.error(), scope)(scope, receive, send)
    finally:
        connection.close()


class _Connection:
    """One request's messages. Watches for the client's leaving as soon as nothing else is to be received."""

    def __init__(self, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "a request is handled by a task"
        self.task = task
        self.lost = False
        self.timed_out = False
        self._receive = receive
        self._send = send
        self._begun = self._ended = False  # the answer
        self._watching: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def watch(self, method: str, deadline: Deadline | None) -> None:
        if deadline is not None:
            self._alarm = asyncio.get_running_loop().call_at(deadline.at, self._ring)
        if method in ("GET", "HEAD"):  # whose routes never ask for a body
            self._watching = asyncio.create_task(self._wait())

    def close(self) -> None:
        for watcher in (self._watching, self._alarm):
            if watcher is not None:
                watcher.cancel()

    async def receive(self) -> Message:
        if self._watching is not None:
            await asyncio.shield(self._watching)
            return {"type": "http.disconnect"}
        message = await self._receive()
        if not message.get("more_body", False):
            self._watching = asyncio.create_task(self._wait())
        return message

    async def send(self, message: Message) -> None:
        self._begun = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    def _ring(self) -> None:
        if not (self._begun or self.lost):
            self.timed_out = True
            self.task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not (self._ended or self.timed_out):
            self.lost = True
            self.task.cancel()
