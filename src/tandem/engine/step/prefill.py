"""`PrefillTask`: a prefill chunk on its way through the layers, piece by piece, while steps run in between.

On a GPU both run at the same time, on a stream each: a free place is given to the step's blocks first. So the host only
has to give the task enough to do. Steps and tasks share weights, pages and counts, none of which a step changes that a
task reads. What kernels need meanwhile comes from each stream's own memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from tandem.engine.sampling.logits import BestRows, DeviceLogits, HostLogits, HostRows, Logits
from tandem.engine.step.hooks import StepHooks
from tandem.engine.step.step import ShrinkingStep, Step
from tandem.engine.step.streams import LaunchThread, Streams
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.ops import ExpertCounts
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState

TaskEvent = Literal["begins", "piece", "ends"]

PIECES_AHEAD = 4  # that a device has to do while a step runs: fewer would leave it idle, more delay the step


@runtime_checkable
class PausingModel(Protocol):
    """A model that can stop between two layers. What others compute meanwhile changes nothing of the task."""

    @property
    def depth(self) -> int:
        """Layers."""
        ...

    def begin(self, batch: ForwardBatch) -> ForwardState:
        """Before the first layer."""
        ...

    def layer(self, p: ForwardState, index: int, states: Rows[tuple[Tensor, ...]]) -> None:
        """After all layers before."""
        ...

    def logits(self, p: ForwardState, states: Rows[tuple[Tensor, ...]]) -> Tensor:
        """float32 [len(batch.logits_rows), vocab], after the last."""
        ...


States = Rows[tuple[Tensor, ...]]


class PrefillPieces(Protocol):
    """Pieces of a chunk, which are given to a device in their order."""

    @property
    def count(self) -> int: ...

    @property
    def ahead(self) -> int:
        """So many a device is given before it has computed them."""
        ...

    def give(self, index: int) -> None: ...

    def result(self) -> tuple[Tensor, Tensor]:
        """After the last: logits, and the best of each row in host memory, as `BestRows` has them. Filled when the
        device has computed them."""
        ...


class LayerPieces:
    """Kernel by kernel: a piece is a layer, the last one makes logits."""

    def __init__(
        self,
        model: PausingModel,
        states: States,
        batch: ForwardBatch,
        tallies: Rows[ExpertCounts] | None,
        best: BestRows | None = None,
    ) -> None:
        """batch: where the model computes; best: for as many rows as have logits, None where nobody asks."""
        self._model, self._states, self._batch = model, states, batch
        self._tallies, self._best = tallies, best
        self._pass: ForwardState
        self._result: tuple[Tensor, Tensor] | None = None

    @property
    def count(self) -> int:
        return self._model.depth + 1

    @property
    def ahead(self) -> int:
        return PIECES_AHEAD

    def give(self, index: int) -> None:
        if index == 0:
            self._pass = self._model.begin(self._batch)
            self._pass.tallies = self._tallies
        if index < self._model.depth:
            self._model.layer(self._pass, index, self._states)
            return
        logits = self._model.logits(self._pass, self._states)
        self._result = logits, logits[:0] if self._best is None else self._best.fetch(logits)

    def result(self) -> tuple[Tensor, Tensor]:
        assert self._result is not None, "pieces are left"
        return self._result


class InFlight:
    """Pieces that a device was given and has not computed yet. On a CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self._events, self._waits = deque[torch.cuda.Event](), device.type == "cuda"

    def mark(self) -> None:
        """One more, on the current stream."""
        if self._waits:
            event = torch.cuda.Event(blocking=True)
            event.record()
            self._events.append(event)

    def count(self) -> int:
        while self._events and self._events[0].query():
            self._events.popleft()
        return len(self._events)

    def wait_for_room(self, most: int) -> None:
        """Until there are fewer."""
        while self.count() >= most:
            self._events[0].synchronize()


def in_layers(
    model: PausingModel,
    batch: ForwardBatch,
    states: Rows[tuple[Tensor, ...]],
    shrinking: ShrinkingStep,
    shrunk_batch: Callable[[Step], ForwardBatch],
) -> Tensor:
    """As `StepModel.forward`. shrunk_batch: of the chunk's first rows, when only they go on."""
    p, in_flight = model.begin(batch), InFlight(batch.input_ids.device)
    for index in range(model.depth):
        in_flight.wait_for_room(PIECES_AHEAD)
        if shrinking.shrink(model.depth - index, model.depth):
            p = p.first(shrunk_batch(shrinking.step))
        model.layer(p, index, states)
        in_flight.mark()
    return model.logits(p, states)


class PrefillPlace(Protocol):
    """Where a task's pieces are computed."""

    @property
    def overlaps(self) -> bool:
        """Whether a device computes them while others go on."""
        ...

    @property
    def in_flight(self) -> InFlight: ...

    def entered(self) -> AbstractContextManager[None]:
        """Around what is given to it."""
        ...

    def leave(self) -> None:
        """No piece follows. Waits until nothing writes to the pages of the task's sequences any more."""
        ...

    def logits(self, logits: Tensor, best: Tensor) -> Logits:
        """Logits of `PrefillPieces.result`."""
        ...


class HostPlace:
    """Where this process computes: a piece is done when it returns."""

    overlaps = False

    def __init__(self, usage: ExpertUsage | None = None) -> None:
        self._usage, self.in_flight = usage, InFlight(torch.device("cpu"))

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def leave(self) -> None:
        if self._usage is not None:
            self._usage.end_beside()

    def logits(self, logits: Tensor, best: Tensor) -> Logits:
        return HostLogits(logits.to(device="cpu", dtype=torch.float32).numpy())


class GpuPlace:
    """A stream of low priority, or the only one, where pieces take turns with steps. A piece returns sooner, unless
    experts in CPU memory have a part in it."""

    overlaps = True

    def __init__(
        self, start: StepHooks, streams: Streams, usage: ExpertUsage | None, rows: HostRows, reserve_sms: bool = False
    ) -> None:
        """start: held. reserve_sms: as `Streams.side_stream`."""
        self._start, self._streams, self._usage, self._rows = start, streams, usage, rows
        self._reserve_sms = reserve_sms
        self.in_flight = InFlight(torch.device("cuda"))

    def entered(self) -> AbstractContextManager[None]:
        return self._streams.side_stream(False, self._reserve_sms)

    def leave(self) -> None:
        self._start.end_task()
        try:
            if self._usage is not None:
                with self.entered():
                    self._usage.end_beside()
        finally:
            self._streams.finish()

    def logits(self, logits: Tensor, best: Tensor) -> DeviceLogits:
        return DeviceLogits(logits, best, self._rows)


def _nobody_else(event: TaskEvent) -> AbstractContextManager[None]:
    return nullcontext()


class PrefillTask:
    """Pieces are layers, and the logits at the end. Of a task whose place overlaps, a piece is only given.

    around: the context of a piece and of the end; other ranks are told there."""

    def __init__(self, pieces: PrefillPieces, place: PrefillPlace, launcher: LaunchThread | None = None) -> None:
        """launcher: gives the pieces; None: whoever asks to go on does."""
        self._pieces, self._place, self._launcher, self._next = pieces, place, launcher, 0
        self.around: Callable[[TaskEvent], AbstractContextManager[None]] = _nobody_else
        if launcher is not None:
            launcher.start(self)

    @property
    def overlaps(self) -> bool:
        return self._place.overlaps

    def pieces_left(self) -> int:
        return self._pieces.count - self._next

    def piece(self) -> None:
        with self.around("piece"), torch.inference_mode(), self._place.entered():
            self._pieces.give(self._next)
            self._place.in_flight.mark()
        self._next += 1

    def wait_for_room(self) -> None:
        """Until the device has little enough to do."""
        self._place.in_flight.wait_for_room(self._pieces.ahead)

    def go_on(self, seconds: float, whole: bool) -> bool:
        """Computes pieces for about so long, at least one, or has them computed; whole: all that are left. Whether all
        have been."""
        if self._launcher is None:
            self._slice(seconds, whole)
        else:
            if whole:
                self._launcher.finish()
            self._launcher.look()
        return not self.pieces_left() and (whole or not self._place.in_flight.count())

    def _slice(self, seconds: float, whole: bool) -> None:
        started = last = perf_counter()
        longest, in_flight = 0.0, self._place.in_flight
        while self.pieces_left() and (whole or in_flight.count() < self._pieces.ahead):
            self.piece()
            now = perf_counter()
            longest, last = max(longest, now - last), now
            if not whole and now - started + longest > seconds:
                break

    def logits(self) -> Logits:
        """After the last piece; waits for it."""
        result = self._pieces.result()
        self.drop()
        return self._place.logits(*result)

    def drop(self) -> None:
        """No piece follows. Waits as `PrefillPlace.leave`."""
        if self._launcher is not None:
            self._launcher.stop()
        with self.around("ends"):
            self._place.leave()


def host_task(model: PausingModel, states: States, batch: ForwardBatch, usage: ExpertUsage | None) -> PrefillTask:
    """Prefill task of a batch in host memory, whose arrays must not change before the end."""
    with torch.inference_mode():
        tallies = None if usage is None else usage.overlap_tallies(len(batch.input_ids))
    return PrefillTask(LayerPieces(model, states, batch, tallies), HostPlace(usage))


class FailedPieces:
    """Pieces of a task that could not begin: the first one says so."""

    count = ahead = 1

    def __init__(self, error: Exception) -> None:
        self._error = error

    def give(self, index: int) -> None:
        raise self._error

    def result(self) -> tuple[Tensor, Tensor]:
        raise self._error
