"""`Turns`: threads use an engine one after the other, which is not thread-safe itself. Ctrl+C waits for a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Condition, get_ident

import torch

from tandem.errors import EngineError
from tandem.process.held_signals import held_signals


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
        with self._turn(lambda: self._take_to_step(unless)) as is_turn:
            yield is_turn

    def _take_to_add(self) -> bool:
        with self._changed:
            self._adding += 1
            try:
                while self._owner is not None:
                    self._changed.wait()
                self._owner = get_ident()
            except BaseException:  # Ctrl+C ends the wait: who let this thread go first would sleep on
                self._changed.notify_all()
                raise
            finally:
                self._adding -= 1
        return True

    def _take_to_step(self, unless: Callable[[], bool]) -> bool:
        with self._changed:
            while not unless():
                if self._owner is None and not self._adding:
                    self._owner = get_ident()
                    return True
                self._changed.wait()
        return False

    @contextmanager
    def _turn(self, take: Callable[[], bool]) -> Iterator[bool]:
        """Raises EngineError in the midst of this thread's turn, as in a signal's handler: it would wait for itself."""
        if self._owner == get_ident():
            raise EngineError("tandem.LLM was called in the midst of its own step, as by a handler of a signal")
        try:
            if not take():
                yield False
                return
            with held_signals():
                try:
                    # torch.cuda.stream(None) would make a context on the GPU of a model that is computed on the CPU
                    with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                        yield True
                finally:
                    self._give_back()
        finally:
            self._give_back()  # where Ctrl+C came before it was held

    def _give_back(self) -> None:
        if self._owner == get_ident():
            with self._changed:
                self._owner = None
                self._changed.notify_all()
