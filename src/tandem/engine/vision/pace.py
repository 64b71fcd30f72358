"""`TowerPace`: how much of an image those who decode wait for, between two of their steps.

A device computes pieces and steps one after the other, in the order of one stream. So a step comes later by what the
pieces before it take, and by no more: kernels of both never share multiprocessors. What pieces take is measured, by
events on a device and by the clock elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

from tandem.engine.pace import SLICE_OF_STEP

DEVICE_SHARE = 0.35  # of a decoding step's time alone: 1.5 times is the most that others may wait beside an image
HOST_SHARE = SLICE_OF_STEP  # a CPU takes seconds for an image: as for a prompt
IDLE_SECONDS = 0.004  # of pieces that a device has to do while nobody decodes
MOST_SECONDS = 0.01  # ... while somebody may: as long as no step says how long one takes
_WEIGHT_OF_NEWEST = 0.3


class PieceWatch(Protocol):
    """Measures pieces, in the order in which they were given."""

    waits: bool
    """Whether a step that is given next waits for pieces that are not measured yet."""

    def begin(self) -> None:
        """Before the first piece of a slice."""
        ...

    def mark(self) -> None:
        """Behind each piece."""
        ...

    def measured(self) -> list[float]:
        """Seconds of pieces that have ended since this was last asked."""
        ...

    def pending(self) -> int:
        """Pieces that have not ended."""
        ...

    def wait(self, most: int) -> None:
        """Until no more than `most` are pending."""
        ...


class HostWatch:
    """A piece has ended when it returns."""

    waits = False

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._last, self._measured = clock, 0.0, list[float]()

    def begin(self) -> None:
        self._last = self._clock()

    def mark(self) -> None:
        now = self._clock()
        self._measured.append(now - self._last)
        self._last = now

    def measured(self) -> list[float]:
        measured, self._measured = self._measured, []
        return measured

    def pending(self) -> int:
        return 0

    def wait(self, most: int) -> None:
        return


class TimedEvent(Protocol):
    """Part of `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds."""
        ...


def _recorded() -> torch.cuda.Event:
    """Event on the current stream."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


class DeviceWatch:
    """Events on the stream that computes. A piece begins where the one before ends."""

    waits = True

    def __init__(self, recorded: Callable[[], TimedEvent] = _recorded) -> None:
        """recorded: a new event, on the current stream."""
        self._recorded, self._pieces = recorded, deque[tuple[TimedEvent, TimedEvent]]()
        self._last: TimedEvent | None = None

    def begin(self) -> None:
        self._last = self._recorded()

    def mark(self) -> None:
        assert self._last is not None, "begin comes first"
        end = self._recorded()
        self._pieces.append((self._last, end))
        self._last = end

    def measured(self) -> list[float]:
        seconds = list[float]()
        while self._pieces and self._pieces[0][1].query():
            begin, end = self._pieces.popleft()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return seconds

    def pending(self) -> int:
        return len(self._pieces)

    def wait(self, most: int) -> None:
        if len(self._pieces) > most:
            self._pieces[len(self._pieces) - 1 - most][1].synchronize()


class TowerPace:
    """Pieces of a slice: as many as fit its seconds by what those before took, and at least one. Where a step waits for
    them they are at most twice those of the slice before: pieces differ, and the first ones say little of others."""

    def __init__(self, watch: PieceWatch, share: float) -> None:
        """share: of a decoding step's time alone, for a slice."""
        self.share, self._watch = share, watch
        self.seconds = 0.0  # of the image's pieces that have ended
        self._each = 0.0  # seconds of a piece; 0: none of this image has ended
        self._budget = self._ended = 0.0  # of the slice: what it may take, and what its pieces took that have ended
        self._launched = self._most = 0  # pieces of the slice: that were given, and that may be

    def share_behind(self, prefilled: bool) -> float:
        """Share of a slice. prefilled: those who decode have waited for a prompt's slice already, on the same CPU. A
        GPU computes prompts beside steps."""
        return self.share / 2 if prefilled and not self._watch.waits else self.share

    def begin_image(self) -> None:
        """Images differ in size, and so do their pieces."""
        self._watch.wait(0)
        self._watch.measured()
        self.seconds = self._each = self._ended = 0.0
        self._launched = 0

    def begin(self, seconds: float) -> None:
        """A slice of so many seconds."""
        self._collect()
        self._most = max(1, 2 * self._launched)
        self._budget = min(seconds, MOST_SECONDS) if self._watch.waits else seconds
        self._ended, self._launched = 0.0, 0
        self._watch.begin()

    def fits(self) -> bool:
        """Whether the slice may have one more piece."""
        pending = self._watch.pending()
        if not self._launched and not pending:
            return True
        if self._watch.waits and self._launched >= self._most:
            return False
        return self._each > 0 and self._ended + (pending + 1) * self._each <= self._budget

    def launched(self) -> None:
        """Notes that a piece was given to the device; called after each."""
        self._watch.mark()
        self._launched += 1
        self._collect()

    def wait(self, everything: bool) -> None:
        """Until a device has little to do, or nothing. Nobody decodes."""
        ahead = int(IDLE_SECONDS / 2 / self._each) if self._each else 0
        self._watch.wait(0 if everything else ahead)

    def ended(self) -> bool:
        """Whether all pieces have."""
        self._collect()
        return not self._watch.pending()

    def delay(self) -> float:
        """Seconds that the step which followed the slice has waited for it, about. Asked behind the step, once."""
        self._collect()
        delay, self._ended = self._ended, 0.0
        return delay if self._watch.waits else 0.0

    def _collect(self) -> None:
        for seconds in self._watch.measured():
            self._each += (seconds - self._each) * (_WEIGHT_OF_NEWEST if self._each else 1.0)
            self.seconds += seconds
            self._ended += seconds


def pace_of(device: torch.device) -> TowerPace:
    """Pace of a tower that computes on `device`."""
    if device.type == "cuda":
        return TowerPace(DeviceWatch(), DEVICE_SHARE)
    return TowerPace(HostWatch(), HOST_SHARE)
