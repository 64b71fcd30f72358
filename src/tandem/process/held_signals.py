"""`held_signals`: what must not be left half done, such as a step of an engine, ends before a signal's handler runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals whose handlers raise: Ctrl+C, and what programs bound their seconds with."""


class Hold:
    holds = False  # signals come to this thread
    pending = False  # one came, and waits
    ended = False


class _Held:
    """Stands for a handler. The second signal does not wait: what the first one waits for may never end. After the end
    of `hold` none does: one that raises there may leave others of these in place."""

    def __init__(self, hold: Hold, number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._hold, self._number, self._handler = hold, number, handler
        self._pending = False

    def take(self) -> None:
        signal.signal(self._number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._pending or self._hold.ended:
            self._handler(number, frame)
        else:
            self._pending = self._hold.pending = True

    def give_back(self) -> None:
        """Not over a handler that somebody has set meanwhile."""
        current: object = signal.getsignal(self._number)
        if current is self:
            signal.signal(self._number, self._handler)

    def run(self) -> None:
        if self._pending:
            self._handler(self._number, None)


@contextmanager
def held_signals() -> Iterator[Hold]:
    """Only the main thread runs handlers, so nothing changes in others. Handlers that are not Python's are not held."""
    if threading.current_thread() is not threading.main_thread():
        yield Hold()
        return
    hold, handlers = Hold(), [(number, signal.getsignal(number)) for number in HELD]
    held = [_Held(hold, number, handler) for number, handler in handlers if callable(handler)]
    try:
        for each in held:
            each.take()
        hold.holds = True
        yield hold
    finally:
        hold.ended = True
        with ExitStack() as runs:
            for each in reversed(held):
                runs.callback(each.run)  # each of them, also where another raises
            for each in held:
                each.give_back()
