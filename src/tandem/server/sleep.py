"""`Sleep`: when an engine that nobody uses is to end, and when it is wanted again. The supervisor does both."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class Sleep:
    """Lives on the event loop.

    `asleep` is true from the end of use until the engine is loaded again. `wanted` is set once a request needs the
    engine, `released` while no process of it runs and its memory is free, `stays` once `soon` was taken back.
    """

    def __init__(self, seconds: float | None, is_busy: Callable[[], bool]) -> None:
        """seconds: without a request until the engine ends; None or below 0: it stays. is_busy: whether something
        runs that the end would lose; `used` or `look` must follow once that is over."""
        self.asleep = False
        self.wakes, self.wake_seconds = 0, 0.0
        self.wanted, self.released, self.stays = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._usual = self._keep = math.inf
        self._is_busy = is_busy
        self._due = asyncio.Event()
        self._awake = False
        self._used_at = self._wanted_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self.usually(seconds)

    def usually(self, seconds: float | None) -> None:
        """Where clients say nothing else."""
        self._usual = self._keep = math.inf if seconds is None or seconds < 0 else seconds
        self.look()

    @property
    def by_itself(self) -> bool:
        """Whether the engine ever sleeps without being told to. Only then clients may say after how long."""
        return self._usual < math.inf

    @property
    def waking(self) -> bool:
        return self.asleep and self.wanted.is_set()

    @property
    def seconds_left(self) -> float:
        """Until the engine sleeps, if nothing comes; inf: it stays."""
        return max(0.0, self._used_at + self._keep - time.monotonic())

    def used(self) -> None:
        """A request came, or was answered: the time counts from here."""
        self._used_at = time.monotonic()
        if self._timer is None:
            self.look()

    def keep(self, seconds: float) -> None:
        """How long to stay after a request from now on, until the next sleep; inf: for good."""
        self._keep = seconds
        if seconds > 0:
            self.stays.set()
        self.look()

    def soon(self) -> None:
        """Sleep as soon as nothing runs; once what waits for a wake is answered, where there is one."""
        self.stays.clear()
        if not self.asleep or self.waking:
            self.keep(0.0)

    def stay(self) -> None:
        """It is wanted for itself: this takes back `soon`, and is a use."""
        self._keep = self._keep or self._usual
        self.stays.set()
        self.used()

    def wake(self) -> None:
        if self.asleep and not self.wanted.is_set():
            self._wanted_at = time.monotonic()
            self.wanted.set()

    def look(self) -> None:
        """Wait for the time that is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._awake and self._keep < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self.seconds_left, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._is_busy():
            return
        if self.seconds_left > 0:
            self.look()
        else:
            self._due.set()

    # --- of the supervisor

    async def until_due(self) -> None:
        """Returns at a moment in which nothing runs, and nobody has told it to stay meanwhile."""
        await self._due.wait()
        while self._is_busy() or self.seconds_left > 0:
            self._due.clear()
            await self._due.wait()

    def starts(self) -> None:
        """An engine process is about to start."""
        self._awake = False
        self._due.clear()
        self.released.clear()

    def loaded(self) -> float | None:
        """The engine takes requests. Returns the seconds of the wake, None where it did not sleep."""
        seconds = time.monotonic() - self._wanted_at if self.asleep else None
        if seconds is not None:
            self.wakes += 1
            self.wake_seconds += seconds
        self.asleep, self._awake = False, True
        self.wanted.clear()
        self.used()
        return seconds

    def begins(self) -> None:
        """The engine is told to end. What clients said of how long it stays is over."""
        self.asleep, self._awake = True, False
        self._keep = self._usual
        self.wanted.clear()
        self.look()

    def failed(self) -> None:
        """It could not be loaded: the next request tries again."""
        self._keep = self._usual
        self.wanted.clear()


async def until_any(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
