"""`GpuPass`: a prompt's chunk on a GPU's stream of low priority, while steps of those who decode run on another.

Both use the GPU at the same time: a free place is given to the step's blocks first. So the host only has to give the
pass enough to do. Steps and passes share weights, pages and counts, none of which a step changes that a pass reads;
what kernels need meanwhile comes from each stream's own memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tandem.engine.feeder import Feeder
from tandem.engine.graphs.spared import products_leave, spared_stream
from tandem.engine.paused_pass import PIECES_AHEAD, PausingModel, slice_of
from tandem.engine.prompt_graphs import Recorder, Work
from tandem.engine.sampling.logits import DeviceLogits, HostRows
from tandem.engine.step.step import ShrinkingStep, Step
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.models.batch import ForwardBatch

HIGH_PRIORITY = -1


@runtime_checkable
class PassStart(Protocol):
    """What operations prepare for a pass that steps overtake."""

    def without_stream(self, batch: ForwardBatch) -> None:
        """Before a step kernel by kernel, in which no expert travels."""
        ...

    def pausable(self) -> bool:
        """Whether they keep nothing that a step would change."""
        ...

    def hold(self, batch: ForwardBatch, split: bool = False) -> bool:
        """Before the pass. What it prepares stays until `release`, whatever graphs are replayed. Whether the GPU can
        compute it alone: the CPU has no part in it. split: it has one, in graphs that were recorded so."""
        ...

    def release(self) -> None: ...

    def replayable(self, split: bool = False) -> bool:
        """Whether layers of passes can be CUDA graphs where the GPU computes them alone; split: or with the CPU."""
        ...

    def may_split(self, rows: int) -> bool:
        """Whether `splits` may say so later."""
        ...

    def splits(self, rows: int) -> bool:
        """Whether it is best that CPU and bus share the experts of so many rows, in layers that are graphs."""
        ...

    def recording(self, recorder: Recorder) -> AbstractContextManager[None]:
        """Around the capture of a layer, as `Travel`."""
        ...


class Streams:
    """One for steps that are replayed and for choosing tokens, which has the right of way; one for all other steps.
    None: there is only one. A third one for passes beside which graphs are replayed, where some multiprocessors are
    spared; it is the second one elsewhere."""

    def __init__(self, device: torch.device, apart: bool, spared: int = 0) -> None:
        """spared: multiprocessors that passes leave to steps."""
        self.steps: torch.cuda.Stream | None = None
        self._others = self._passes = self.steps
        self._spared = spared
        if apart and device.type == "cuda":
            self.steps, self._others = _pair(device)
            self._passes = spared_stream(device, spared) if spared else self._others

    def enter(self) -> None:
        """Before anything is captured. This thread computes on the first one from now on."""
        if self.steps is not None:
            torch.cuda.synchronize(self.steps.device)
            torch.cuda.empty_cache()  # what another stream has freed cannot be used on this one
            torch.cuda.set_stream(self.steps)

    @contextmanager
    def aside(self, after: bool = True, spares: bool = False) -> Iterator[None]:
        """after: what is computed here comes after all that the first stream was given until now. False: it needs
        nothing of that, and a graph may be running there. spares: some multiprocessors, where that was asked for."""
        stream = self._passes if spares else self._others
        if stream is None:
            yield
            return
        if after:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def cut(self, spares: bool) -> AbstractContextManager[None]:
        """Around the capture of what is replayed there: products are cut for its multiprocessors."""
        return products_leave(self._spared if spares else 0)

    def finish(self) -> None:
        """Waits for what was computed aside."""
        for stream in (self._others, self._passes):
            if stream is not None:
                stream.synchronize()


@cache
def _pair(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Of a process: an engine that is made anew finds what the memory of the last one belongs to."""
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY), torch.cuda.Stream(device, priority=0)


class Given:
    """Pieces that a device was given and has not computed yet. On a CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self._events, self._waits = deque[torch.cuda.Event](), device.type == "cuda"

    def mark(self) -> None:
        """One more, on the current stream."""
        if self._waits:
            event = torch.cuda.Event(blocking=True)
            event.record()
            self._events.append(event)

    def under_way(self) -> int:
        while self._events and self._events[0].query():
            self._events.popleft()
        return len(self._events)

    def wait_for_room(self, most: int) -> None:
        """Until there are fewer."""
        while self.under_way() >= most:
            self._events[0].synchronize()


def in_layers(
    model: PausingModel,
    batch: ForwardBatch,
    states: Rows[tuple[Tensor, ...]],
    shrinking: ShrinkingStep,
    shrunk_batch: Callable[[Step], ForwardBatch],
) -> Tensor:
    """As `StepModel.forward`. shrunk_batch: of the chunk's first rows, when only they go on."""
    p, given = model.begin(batch), Given(batch.input_ids.device)
    for index in range(model.depth):
        given.wait_for_room(PIECES_AHEAD)
        if shrinking.shrink(model.depth - index, model.depth):
            p = p.first(shrunk_batch(shrinking.step))
        model.layer(p, index, states)
        given.mark()
    return model.logits(p, states)


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
