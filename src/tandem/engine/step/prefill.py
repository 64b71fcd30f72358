"""`PausedPass`: a prompt's chunk on its way through the layers, piece by piece, while others decode in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from time import perf_counter
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tandem.engine.sampling.logits import BestRows, HostLogits, Logits
from tandem.engine.step.step import ShrinkingStep, Step
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.ops import Tally
from tandem.models.batch import ForwardBatch
from tandem.models.passing import Pass

PIECES_AHEAD = 4  # that a device has to do while a step runs: fewer would leave it idle, more delay the step


@runtime_checkable
class PausingModel(Protocol):
    """A model that can stop between two layers. What others compute meanwhile changes nothing of the pass."""

    @property
    def depth(self) -> int:
        """Layers."""
        ...

    def begin(self, batch: ForwardBatch) -> Pass:
        """Before the first layer."""
        ...

    def layer(self, p: Pass, index: int, states: Rows[tuple[Tensor, ...]]) -> None:
        """After all layers before."""
        ...

    def logits(self, p: Pass, states: Rows[tuple[Tensor, ...]]) -> Tensor:
        """float32 [len(batch.logits_rows), vocab], after the last."""
        ...


States = Rows[tuple[Tensor, ...]]


class Work(Protocol):
    """A pass in pieces, which the GPU is given in their order."""

    @property
    def pieces(self) -> int: ...

    @property
    def ahead(self) -> int:
        """So many the GPU is given before it has computed them."""
        ...

    def give(self, index: int) -> None: ...

    def found(self) -> tuple[Tensor, Tensor]:
        """After the last: logits, and the best of each row in host memory. Filled when the GPU has computed it."""
        ...


class LayerWork:
    """Kernel by kernel: a piece is a layer, the last one makes logits."""

    def __init__(
        self,
        model: PausingModel,
        states: States,
        batch: ForwardBatch,
        tallies: Rows[Tally] | None,
        best: BestRows,
    ) -> None:
        """batch: on the GPU; best: for as many rows as have logits."""
        self._model, self._states, self._batch, self._tallies, self._best = (
            model,
            states,
            batch,
            tallies,
            best,
        )
        self._pass: Pass
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def pieces(self) -> int:
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
        self._found = logits, self._best.fetch(logits)

    def found(self) -> tuple[Tensor, Tensor]:
        assert self._found is not None, "pieces are left"
        return self._found


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


class Pausing(Protocol):
    """What a runner gives for chunks that may wait. Pieces are layers, and the logits at the end."""

    @property
    def overlaps(self) -> bool:
        """Whether a device computes it while others go on."""
        ...

    def go_on(self, seconds: float, whole: bool) -> bool:
        """Computes pieces for about so long, at least one, or has them computed; whole: all that are left. Whether all
        have been."""
        ...

    def logits(self) -> Logits:
        """After the last piece; waits for it."""
        ...

    def drop(self) -> None:
        """No piece follows. Waits until nothing writes to the pages of its sequences any more."""
        ...


class Pieces(Protocol):
    def pieces_left(self) -> int: ...

    def piece(self) -> None: ...

    def under_way(self) -> int:
        """Pieces that a device was given and has not computed yet."""
        ...


def slice_of(pieces: Pieces, seconds: float, whole: bool, ahead: int = PIECES_AHEAD) -> bool:
    """`Pausing.go_on` where the engine's thread does it. A device is given no more than `ahead` pieces."""
    started = last = perf_counter()
    longest = 0.0
    while pieces.pieces_left() and (whole or pieces.under_way() < ahead):
        pieces.piece()
        now = perf_counter()
        longest, last = max(longest, now - last), now
        if not whole and now - started + longest > seconds:
            break
    return not pieces.pieces_left() and (whole or not pieces.under_way())


class PausedPass:
    """Where this process computes: a piece is done when it returns."""

    overlaps = False

    def __init__(
        self,
        model: PausingModel,
        states: Rows[tuple[Tensor, ...]],
        batch: ForwardBatch,
        usage: ExpertUsage | None,
    ) -> None:
        """The batch's arrays must not change before the end."""
        self._model, self._states, self._usage = model, states, usage
        self._next, self._logits = 0, torch.empty(0)
        with torch.inference_mode():
            self._pass = model.begin(batch)
            self._pass.tallies = None if usage is None else usage.beside(len(batch.input_ids))

    def go_on(self, seconds: float, whole: bool) -> bool:
        return slice_of(self, seconds, whole)

    def pieces_left(self) -> int:
        return self._model.depth + 1 - self._next

    def piece(self) -> None:
        with torch.inference_mode():
            if self._next < self._model.depth:
                self._model.layer(self._pass, self._next, self._states)
            else:
                self._logits = self._model.logits(self._pass, self._states)
        self._next += 1

    def under_way(self) -> int:
        return 0

    def logits(self) -> Logits:
        self._count()
        return HostLogits(self._logits.to(device="cpu", dtype=torch.float32).numpy())

    def drop(self) -> None:
        self._count()

    def _count(self) -> None:
        if self._usage is not None:
            self._usage.end_beside()
