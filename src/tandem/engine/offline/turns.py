"""`Turns`: threads use an engine one after the other, which is not thread-safe itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

import torch


class Turns:
    """Threads that add requests come before those that step: one that steps without a pause would keep them out.

    A thread's current stream is its own. The engine's steps are computed on the one of the thread that made this."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._taken = False
        self._adding = 0  # threads that wait to add
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def adding(self) -> Iterator[None]:
        with self._changed:
            self._adding += 1
            try:
                while self._taken:
                    self._changed.wait()
                self._taken = True
            finally:
                self._adding -= 1
        with self._turn():
            yield

    @contextmanager
    def stepping(self, unless: Callable[[], bool]) -> Iterator[bool]:
        """False: `unless` came true before it was this thread's turn, since another one has stepped."""
        with self._changed:
            while (wanted := not unless()) and (self._taken or self._adding):
                self._changed.wait()
            self._taken = self._taken or wanted
        if not wanted:
            yield False
            return
        with self._turn():
            yield True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()
