"""`Feeder`: a thread that gives a pass's pieces to a GPU while the engine's thread waits for a step.

Giving a piece costs the host about as long as the GPU takes to compute it. So the engine's thread would either let the
GPU idle or let those who decode wait.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

SWITCH_SECONDS = (
    2e-4  # in which Python's lock changes hands: with its usual 5 ms a step's end would wait for pieces
)

_log = logging.getLogger(__name__)


class Fed(Protocol):
    """What has pieces to give."""

    def pieces_left(self) -> int: ...

    def piece(self) -> None: ...

    def wait_for_room(self) -> None:
        """Returns when the GPU has little enough to do."""
        ...


class Feeding:
    """One pass on its way. error: what ended it before its time."""

    def __init__(self, paused: Fed) -> None:
        self.paused, self.ended = paused, Event()
        self.stopped = False
        self.error: BaseException | None = None

    def run(self, open_: Event) -> None:
        try:
            while self.paused.pieces_left() and not self.stopped:
                self.paused.wait_for_room()
                open_.wait()
                if not self.stopped:
                    self.paused.piece()
        except BaseException as error:  # the engine's thread raises it
            self.error = error
        finally:
            self.ended.set()


class Feeder:
    """One thread, one pass at a time. It is made before the engine's thread is pinned to a CPU, so it shares none. A
    process ends without waiting for it: the GPU may never answer."""

    def __init__(self, enter: Callable[[], object] = lambda: None) -> None:
        """enter: called in the thread first."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._asked, self._open = SimpleQueue[Feeding | None](), Event()
        self._given: Feeding | None = None
        Thread(
            target=_serve, args=(enter, self._asked, self._open), name="tandem-prompts", daemon=True
        ).start()

    def start(self, paused: Fed) -> None:
        self._given = Feeding(paused)
        self._asked.put(self._given)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Pieces are given meanwhile, by the feeder's thread. One may still be under way at the end. Within itself
        nothing changes."""
        before = self._open.is_set()
        self._open.set()
        try:
            yield
        finally:
            if not before:
                self._open.clear()

    def look(self) -> None:
        """Raises what a piece raised."""
        if self._given is not None and self._given.error is not None:
            raise self._given.error

    def finish(self) -> None:
        """Waits until all pieces are given. Raises what one of them raised."""
        if self._given is not None:
            with self.opened():
                self._given.ended.wait()
            self.look()

    def stop(self) -> None:
        """No piece is given any more when this returns."""
        given, self._given = self._given, None
        if given is None:
            return
        given.stopped = True
        with self.opened():
            given.ended.wait()
        if given.error is not None:
            _log.warning("a prompt that was given up had failed before: %s", given.error)

    def __del__(self) -> None:
        self._asked.put(None)


def _serve(enter: Callable[[], object], asked: SimpleQueue[Feeding | None], open_: Event) -> None:
    """Holds no `Feeder`: the thread ends with its engine."""
    enter()
    while (feeding := asked.get()) is not None:
        feeding.run(open_)
        del feeding
