"""`AnsweringProtocol`: uvicorn's HTTP where a connection has several requests, a client that closes its side, or
HTTP/1.0."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.server.guard.half_closed import HalfClosed
from tandem.server.guard.unframed import Unframed
from tandem.server.limits import EOF_SECONDS, LINGER_SECONDS


class AnsweringProtocol(HttpToolsProtocol):
    """Requests are answered in turn. `cycle` is uvicorn's newest request, which may wait for its turn."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._answered: RequestResponseCycle | None = None  # the newest request that a task answers
        self._last_words: bytes | None = None  # behind the answers to all requests
        self._half_closed: HalfClosed | None = None
        self._asked_at = 0.0  # when the newest request was whole, on the event loop's clock

    def connection_lost(self, error: Exception | None) -> None:
        if self._half_closed is not None:
            self._half_closed.cancel()
        super().connection_lost(error)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True  # uvicorn tells the newest request alone
            self._answered.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """False: the connection is closed, and what runs for it ends. A client whose answer has begun has left, unless
        it closed its side right behind its request: then its answer tells, as writing it fails for one that left."""
        cycle = self._answered
        if cycle is None or cycle.response_complete or cycle.more_body or cycle.scope["http_version"] == "1.0":
            return False
        if cycle.response_started and self.loop.time() - self._asked_at > EOF_SECONDS:
            return False
        self.cycle.keep_alive = False
        self._half_closed = HalfClosed(self.transport, lambda: cycle.response_started)
        return True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle.scope["http_version"] == "1.0":
            self.cycle.send = Unframed(self.cycle).send  # type: ignore[method-assign, assignment]

    def on_message_complete(self) -> None:
        self._asked_at = self.loop.time()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._last_words is not None and not self._is_answering:
            self._end(self._last_words)

    def end_with(self, last_words: bytes, refused: RequestResponseCycle | None) -> None:
        """Behind the answers to the requests that came before. refused: the request that gets no other answer; None:
        there is none yet."""
        for queued in [each for each in self.pipeline if each[0] is refused]:
            self.pipeline.remove(queued)
        if self._is_answering and self._answered is not refused:
            self._last_words = last_words
        else:
            self._end(last_words)

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _end(self, last_words: bytes) -> None:
        """Not at once: a client that still sends would not see them."""
        if self.transport.is_closing():
            return
        self.transport.write(last_words)
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
