"""`Feeder`: a thread that gives a pass's pieces to a GPU while the engine's thread waits for a step.

Giving a piece costs the host about as long as the GPU takes to compute it. So the engine's thread would either let the
GPU idle or let those who decode wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Protocol

SWITCH_SECONDS = 2e-4  # in which Python's lock changes hands: with its usual 5 ms a step's end would wait for pieces


class Fed(Protocol):
    """What has pieces to give."""

    def pieces_left(self) -> int: ...

    def piece(self) -> None: ...

    def wait_for_room(self) -> None:
        """Returns when the GPU has little enough to do."""
        ...


class Feeder:
    """One thread, one pass at a time. It is made before the engine's thread is pinned to a CPU, so it shares none."""

    def __init__(self, enter: Callable[[], object] = lambda: None) -> None:
        """enter: called in the thread first."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._thread = ThreadPoolExecutor(1, "tandem-prompts", initializer=enter)
        self._thread.submit(_nothing).result()  # the thread is there now
        self._open, self._stopped = Event(), False
        self._given: Future[None] | None = None

    def start(self, paused: Fed) -> None:
        self._stopped = False
        self._given = self._thread.submit(self._feed, paused)

    def _feed(self, paused: Fed) -> None:
        while paused.pieces_left():
            self._open.wait()
            paused.wait_for_room()
            if self._stopped:
                return
            paused.piece()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Pieces are given meanwhile: the engine's thread only waits."""
        self._open.set()
        try:
            yield
        finally:
            self._open.clear()

    def look(self) -> None:
        """Raises what a piece raised."""
        if self._given is not None and self._given.done():
            self._given.result()

    def finish(self) -> None:
        """Waits until all pieces are given. Raises what one of them raised."""
        if self._given is not None:
            with self.opened():
                self._given.result()

    def stop(self) -> None:
        """No piece is given any more when this returns."""
        self._stopped = True
        if self._given is not None:
            with self.opened():
                self._given.exception()
        self._given = None


def _nothing() -> None: ...
