"""`GpuPass`: a prompt's chunk on a GPU's stream of low priority, while steps of those who decode run on another.

Both use the GPU at the same time: a free place is given to the step's blocks first. So the host only has to give the
pass enough to do. Steps and passes share weights, pages and counts, none of which a step changes that a pass reads;
what kernels need meanwhile comes from each stream's own memory.
"""

from __future__ import annotations

import torch

from tandem.engine.feeder import Feeder
from tandem.engine.sampling.logits import DeviceLogits, HostRows
from tandem.engine.step.hooks import PassStart
from tandem.engine.step.prefill import Given, Work, slice_of
from tandem.engine.step.streams import Streams
from tandem.experts.usage.expert_usage import ExpertUsage


class GpuPass:
    """A piece is given to the GPU; it returns sooner, unless experts in CPU memory have a part in it."""

    overlaps = True

    def __init__(
        self,
        work: Work,
        start: PassStart,
        streams: Streams,
        usage: ExpertUsage | None,
        rows: HostRows,
        feeder: Feeder | None,
        spares: bool = False,
    ) -> None:
        """start: held. feeder: gives its pieces; None: whoever asks to go on does. spares: as `Streams.aside`."""
        self._work, self._start, self._streams, self._usage, self._rows = work, start, streams, usage, rows
        self._next, self._given = 0, Given(torch.device("cuda"))
        self._feeder, self._spares = feeder, spares
        if feeder is not None:
            feeder.start(self)

    def pieces_left(self) -> int:
        return self._work.pieces - self._next

    def piece(self) -> None:
        with torch.inference_mode(), self._streams.aside(False, self._spares):
            self._work.give(self._next)
            self._given.mark()
        self._next += 1

    def under_way(self) -> int:
        return self._given.under_way()

    def wait_for_room(self) -> None:
        self._given.wait_for_room(self._work.ahead)

    def go_on(self, seconds: float, whole: bool) -> bool:
        if self._feeder is None:
            return slice_of(self, seconds, whole, self._work.ahead)
        if whole:
            self._feeder.finish()
        self._feeder.look()
        return not self.pieces_left() and (whole or not self.under_way())

    def logits(self) -> DeviceLogits:
        found = self._work.found()
        self.drop()
        return DeviceLogits(*found, self._rows)

    def drop(self) -> None:
        if self._feeder is not None:
            self._feeder.stop()
        self._start.release()
        try:
            if self._usage is not None:
                with self._streams.aside(False, self._spares):
                    self._usage.end_beside()
        finally:
            self._streams.finish()
