"""`HalfClosed`: a client that has closed its side behind a whole request waits for the answer (`nc -N`), or has left.

TCP tells the two apart only by what comes back when something is sent. So an interim response is, which HTTP/1.1's
clients skip: the system of one that has left refuses it, or says nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable

FIRST_SECONDS = 0.1  # until the first, and then the second, which finds out what became of the first
MOST_SECONDS = 10.0  # between two later ones; each waits twice as long as the last

_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


class HalfClosed:
    def __init__(self, transport: asyncio.Transport, is_begun: Callable[[], bool]) -> None:
        """is_begun: whether the answer is: then nothing else may be sent, and writing it finds out the same."""
        self._transport, self._is_begun = transport, is_begun
        self._loop = asyncio.get_running_loop()
        self._sent = 0
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


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the client's system has not taken."""
    number = transport.get_extra_info("socket").fileno()
    return int(struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4))[0])
