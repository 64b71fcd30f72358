"""`Wire`: HTTP/1.1 to one model's server over its unix socket, as thin as it can be. Connections are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import cast

import httptools

from tandem.errors import EngineError

Headers = Iterable[tuple[bytes, bytes]]

KEPT_SECONDS = 30.0  # of a connection that nobody uses; the server closes it after 60
MOST_UNREAD_BYTES = 1 << 20  # of an answer whose client reads slowly
LOST = "the model's server ended before its answer did; try again"


class Unreached(EngineError):
    """Nobody listens: what was asked has not been heard."""


class ProxiedAnswer(asyncio.Protocol):
    """A connection, and the answer that comes over it: `head`, then `part` until it is b"". Raises EngineError where
    the other side is gone."""

    def __init__(self, wire: Wire) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.free_since = time.monotonic()
        self._wire = wire
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._unread = 0
        self._headed = self._complete = self._lost = self._paused = False
        self._waiting: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return not self._lost

    def ask(self, request: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, []
        self._headed = self._complete = False
        assert self._transport is not None
        self._transport.write(request)

    async def head(self) -> int:
        """The status; `headers` are there then."""
        while not self._headed:
            await self._next()
        return self.status

    async def part(self) -> bytes:
        """All that has come of the body since the last call; b"": it is over, and the connection is kept."""
        while not self._parts:
            if self._complete:
                self._wire.keep(self)
                return b""
            await self._next()
        data = b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def whole(self) -> bytes:
        parts = []
        while data := await self.part():
            parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        """Nobody wants the answer any more: the other side sees that at once."""
        if self._transport is not None:
            self._transport.abort()

    async def _next(self) -> None:
        if self._lost:
            raise EngineError(LOST)
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def _notify(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # --- asyncio and the parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self._lost = True
        self._notify()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._wire.forget(self)
        if self._waiting is not None and not self._waiting.done():  # in mid-answer: what is kept may be dead, too
            self._wire.close()
        self._notify()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status, self._headed = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._unread += len(body)
        if self._unread > MOST_UNREAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._complete = True


class Wire:
    """All connections to one socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._free: list[ProxiedAnswer] = []

    async def ask(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> ProxiedAnswer:
        """target: path and query, as sent. The caller reads all of the answer, or closes it. Raises EngineError."""
        answer = self._newest_free() or await self._connect()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        head = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\n".encode("latin-1")
        answer.ask(b"%b%bcontent-length: %d\r\n\r\n%b" % (head, lines, len(body), body))
        return answer

    async def get(self, target: str, headers: Headers = ()) -> tuple[int, bytes]:
        """Status and body. Raises EngineError."""
        answer = await self.ask("GET", target, headers)
        try:
            return await answer.head(), await answer.whole()
        except BaseException:
            answer.close()
            raise

    def keep(self, answer: ProxiedAnswer) -> None:
        if answer.is_open and answer not in self._free:
            answer.free_since = time.monotonic()
            self._free.append(answer)

    def forget(self, answer: ProxiedAnswer) -> None:
        if answer in self._free:
            self._free.remove(answer)

    def close(self) -> None:
        for answer in list(self._free):
            answer.close()

    def _newest_free(self) -> ProxiedAnswer | None:
        """The one that was used last; older ones may be about to be closed."""
        while self._free:
            answer = self._free.pop()
            if time.monotonic() - answer.free_since < KEPT_SECONDS:
                return answer
            answer.close()
        return None

    async def _connect(self) -> ProxiedAnswer:
        try:
            _, answer = await asyncio.get_running_loop().create_unix_connection(
                lambda: ProxiedAnswer(self), self._path
            )
        except OSError as error:
            raise Unreached(LOST) from error
        return answer
