"""`GuardedProtocol`: uvicorn's HTTP with bounds on what a client may send before its request is whole.

How long it may take to send or to read is bounded, too.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tandem.server.errors import ApiError, form_of
from tandem.server.guard.answering import AnsweringProtocol
from tandem.server.limits import (
    BODY_SECONDS,
    HEAD_SECONDS,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_URL_BYTES,
    UNREAD_SECONDS,
)

log = logging.getLogger("tandem.server")

_PIECE_BYTES = 16 << 10  # fed to the parser at once: so much more than their limit headers may have


class GuardedProtocol(AnsweringProtocol):
    """One connection. What it refuses never reaches the application, so the key does not matter."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sending: asyncio.TimerHandle | None = None  # rings when the client has sent too slowly
        self._reading: asyncio.TimerHandle | None = None  # rings when it has read nothing
        self._refusal: ApiError | None = None
        self._refused = False
        self._used = False  # a request has begun
        self._in_head = False
        self._head_bytes = 0  # of header lines
        self._head_fed = 0  # of all that came before a head was complete
        self._untold = 0  # since the parser last said what it had read
        self._told = self._begun = False  # by the parser, of what it was fed last: something, a request

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(_refusal(503, "too many connections are open; try again later", "overloaded"))
            self.transport.close()
            return
        self._expect(HEAD_SECONDS)

    def connection_lost(self, error: Exception | None) -> None:
        self._expect(None)
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._sending is None and (self.cycle is None or self.cycle.response_complete):
            self._expect(HEAD_SECONDS)
        for begin in range(0, len(data), _PIECE_BYTES):
            if self._refused or self.transport.is_closing():
                return
            self._feed(data[begin : begin + _PIECE_BYTES])

    def _feed(self, piece: bytes) -> None:
        """A head is counted from the piece behind the one that it begins in: nobody knows where."""
        self._told = self._begun = False
        super().data_received(piece)
        self._untold = 0 if self._told else self._untold + len(piece)
        self._head_fed = self._head_fed + len(piece) if self._in_head and not self._begun else 0
        if max(self._untold, self._head_fed) > MAX_URL_BYTES + MAX_HEAD_BYTES:
            self._refuse(_headers_too_large())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        super().resume_writing()

    # --- the parser

    def on_message_begin(self) -> None:
        self._used = self._told = self._in_head = self._begun = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._told = True
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop_parsing(_refusal(414, f"the URL is longer than {MAX_URL_BYTES} bytes", "url_too_long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also of trailers, after the body."""
        self._told = True
        self._head_bytes += len(name) + len(value) + 4
        super().on_header(name, value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._stop_parsing(_headers_too_large())

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect(BODY_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._told = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._expect(None)
        super().on_message_complete()

    # --- bounds

    def _expect(self, seconds: float | None) -> None:
        """The next part of the request, within so many seconds; None: nothing."""
        if self._sending is not None:
            self._sending.cancel()
        self._sending = None if seconds is None else self.loop.call_later(seconds, self._time_out, seconds)

    def _time_out(self, seconds: float) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._expect(seconds)
            return
        if not self._used:  # a connection that was opened in case it is needed
            self.transport.close()
            return
        message = f"the request did not arrive within {seconds:g} s; send it faster, or less"
        self._refuse(_refusal(408, message, "request_too_slow"))

    def _wait_for_reader(self, unread: int) -> None:
        self._reading = self.loop.call_later(UNREAD_SECONDS, self._check_reader, unread)

    def _check_reader(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread < before:
            self._wait_for_reader(unread)
            return
        log.warning("a client has read nothing for %g s; its connection is closed", UNREAD_SECONDS)
        self.transport.abort()

    def _stop_parsing(self, refusal: ApiError) -> None:
        """uvicorn turns any exception of a callback into `send_400_response`."""
        self._refusal = refusal
        raise refusal

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or _refusal(400, "this is not HTTP", "invalid_http"))

    def _refuse(self, refusal: ApiError) -> None:
        """Answers where that is still possible: behind the answers to requests that came before."""
        self._expect(None)
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        newest = self.cycle
        unfinished = newest is not None and newest.more_body and not newest.response_complete
        wrong = newest if unfinished else None  # what has come of its body is
        if wrong is not None and wrong.response_started:
            self.transport.abort()
        else:
            self.end_with(_written(self.config.app, getattr(self, "url", b""), refusal), wrong)


def _written(app: Any, url: bytes, refusal: ApiError) -> bytes:
    """url: as much of it as has come."""
    body = form_of(app, url.decode("latin-1"))(refusal)
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return STATUS_LINE[refusal.status] + head % len(body) + body


def _refusal(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, code=code)


def _headers_too_large() -> ApiError:
    message = f"the headers have more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines; send fewer"
    return _refusal(431, message, "headers_too_large")
