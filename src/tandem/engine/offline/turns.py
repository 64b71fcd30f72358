"""`Turns`: threads use an engine one after the other, which is not thread-safe itself. Ctrl+C waits for a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Condition, get_ident

import torch

from tandem.errors import EngineError
from tandem.process.held_signals import Hold, held_signals

_LOOK_SECONDS = 0.05  # how often a thread that waits for its turn looks for signals


class Turns:
    """Threads that add requests come before those that step: one that steps without a pause would keep them out.

    A thread's current stream is its own. The engine's steps are computed on the one of the thread that made this."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._owner: int | None = None  # thread whose turn it is
        self._adding = 0  # threads that wait to add
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def adding(self) -> Iterator[None]:
        with self._turn(self._take_to_add):
            yield

    @contextmanager
    def stepping(self, unless: Callable[[], bool]) -> Iterator[bool]:
        """False: `unless` came true before it was this thread's turn, since another one has stepped."""
        with self._turn(lambda hold: self._take_to_step(hold, unless)) as is_turn:
            yield is_turn

    def _take_to_add(self, hold: Hold) -> bool | None:
        with self._changed:
            self._adding += 1
            try:
                while self._owner is not None and not hold.pending:
                    self._wait(hold)
            finally:
                self._adding -= 1
            if hold.pending:
                self._changed.notify_all()  # who let this thread go first would sleep on
                return None
            self._owner = get_ident()
        return True

    def _take_to_step(self, hold: Hold, unless: Callable[[], bool]) -> bool | None:
        with self._changed:
            while not unless():
                if hold.pending:
                    return None
                if self._owner is None and not self._adding:
                    self._owner = get_ident()
                    return True
                self._wait(hold)
        return False

    def _wait(self, hold: Hold) -> None:
        """The thread that signals come to looks for them: one that raised in here would leave the lock taken."""
        self._changed.wait(_LOOK_SECONDS if hold.holds else None)

    @contextmanager
    def _turn(self, take: Callable[[Hold], bool | None]) -> Iterator[bool]:
        """take: None where a signal came first. Raises EngineError in the midst of this thread's turn, as in a signal's
        handler: it would wait for itself."""
        if self._owner == get_ident():
            raise EngineError("tandem.LLM was called in the midst of its own step, as by a handler of a signal")
        mine = None
        while mine is None:
            with held_signals() as hold:
                try:
                    mine = take(hold)
                    if mine is not None:
                        # torch.cuda.stream(None) would make a context on the GPU of a model that is computed on the CPU
                        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                            yield mine
                finally:
                    self._give_back()

    def _give_back(self) -> None:
        if self._owner == get_ident():
            with self._changed:
                self._owner = None
                self._changed.notify_all()
