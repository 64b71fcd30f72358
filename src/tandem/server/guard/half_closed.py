"""`HalfClosed`: a client that has closed its side behind a whole request waits for the answer (`nc -N`), or has left.

TCP tells the two apart only by what comes back when something is sent. So an interim response is, which HTTP/1.1's
clients skip: the system of one that has left refuses it, or says nothing. Within an answer that has begun only its own
pieces can be sent. If none follows, the client counts as having left: somebody would be worked for in vain otherwise.
Of a Unix socket the system says it, and nothing is sent.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Callable

FIRST_SECONDS = 0.1  # until the first, and then the second, which finds out what became of the first
MOST_SECONDS = 10.0  # between two later ones; each waits twice as long as the last
LOOK_SECONDS = 1.0  # between two at a Unix socket
QUIET_SECONDS = 5.0  # without a piece of an answer that has begun: slow models have one a second

_STATE_CLOSED = 7  # of Linux's tcp_info: the other system has refused what came
_BYTES_ACKED_OFFSET = 120  # of tcp_info, a u64

_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


class HalfClosed:
    def __init__(self, transport: asyncio.Transport, is_begun: Callable[[], bool]) -> None:
        """is_begun: whether the answer is: then nothing else may be sent, and writing it finds out the same."""
        self._transport, self._is_begun = transport, is_begun
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        if transport.get_extra_info("socket").family == socket.AF_UNIX:
            self._timer = self._loop.call_later(FIRST_SECONDS, self._look_at_unix)
        elif is_begun():
            written = _written_bytes(transport)
            self._timer = self._loop.call_later(QUIET_SECONDS, self._look_at_pieces, written)
        else:
            self._timer = self._loop.call_later(FIRST_SECONDS, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._is_begun() or self._transport.is_closing():
            return
        if self._sent > 1 and _unacknowledged(self._transport):
            self._transport.abort()
            return
        self._transport.write(_INTERIM)
        self._sent += 1
        self._timer = self._loop.call_later(min(MOST_SECONDS, FIRST_SECONDS * 2 ** (self._sent - 1)), self._look)

    def _look_at_unix(self) -> None:
        if self._transport.is_closing():
            return
        if _is_hung_up(self._transport):
            self._transport.abort()
            return
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look_at_unix)

    def _look_at_pieces(self, written_bytes: int) -> None:
        """written_bytes: when the client closed its side. Pieces that wait here are more than a slow reader takes."""
        if self._transport.is_closing() or self._transport.get_write_buffer_size():
            return
        if _is_refused(self._transport) or _written_bytes(self._transport) == written_bytes:
            self._transport.abort()


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the client's system has not taken."""
    number = transport.get_extra_info("socket").fileno()
    return int(struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4))[0])


def _tcp_info(transport: asyncio.Transport) -> bytes:
    """Linux's `tcp_info` of the connection."""
    info: bytes = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return info


def _written_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the system has been given for the client, whether it has taken them or not."""
    return int(struct.unpack_from("Q", _tcp_info(transport), _BYTES_ACKED_OFFSET)[0]) + _unacknowledged(transport)


def _is_refused(transport: asyncio.Transport) -> bool:
    return _tcp_info(transport)[0] == _STATE_CLOSED


def _is_hung_up(transport: asyncio.Transport) -> bool:
    """Whether the other side of a Unix socket has closed both directions."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
