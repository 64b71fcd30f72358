"""`LiveExchange`: makes an expert on the GPU and one in CPU memory change places while the model serves.

Neither has a second copy anywhere, so both travel through staging memory, and are used where they were until both have
arrived:

   CPU place ──workers──▶ pinned ──DMA──▶ GPU staging ─ ─▶ slot      the one that comes
   CPU spare ◀──workers── pinned ◀──DMA── slot                       the one that leaves

Workers copy between steps, when the pool has nothing to do; DMA runs beside the steps, `bytes_per_step` of it at a
time. Once it is through, between two steps: the leaving expert is put into the layer's spare place, its entry in the
GPU's table becomes -1, the slot is overwritten, the coming expert's entry becomes the slot, and its old place is the
spare one. Each of these leaves a placement that is right; an error before the slot is touched drops the exchange.

Memory: one spare place per layer on the CPU (1/128 or 1/512 of a layer there), but staging for all layers on the GPU,
whose memory is what there is little of: a spare slot in each of 94 layers would be 1 GB of Qwen3-235B in int4.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tandem.experts.handoff import plain
from tandem.experts.live_copies import Copies, Mark
from tandem.experts.live_policy import Exchange
from tandem.kernels.packed_experts import PackedExperts

_log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20  # on the GPU, and in each direction in pinned memory
LEAST_STAGES, MOST_STAGES = 2, 64


class Slots(Protocol):
    """A layer's experts on the GPU, as `kernels.gpu.experts.GpuExperts` has them."""

    @property
    def bytes_per_expert(self) -> int: ...

    def slot(self, index: int) -> Tensor:
        """uint8 [bytes_per_expert], where it lies."""
        ...

    def point(self, expert: int, slot: int) -> None:
        """From the next step on the expert is in `slot`; -1: not on the GPU. In place: graphs read it there."""
        ...

    def slot_of_expert(self, expert: int) -> int: ...


@dataclass(frozen=True, slots=True)
class LiveLayer:
    """Both sides of one layer. `cpu` has a place more than experts."""

    gpu: Slots
    cpu: PackedExperts


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of exchanges: `stranded` ones put the leaving expert into CPU memory, but their slot is lost."""

    done: list[Exchange] = field(default_factory=list)
    dropped: list[Exchange] = field(default_factory=list)
    stranded: list[Exchange] = field(default_factory=list)


class _Stage:
    def __init__(self, copies: Copies, nbytes: int) -> None:
        self.coming, self.leaving = copies.pinned(nbytes), copies.pinned(nbytes)
        self.there = copies.there(nbytes)


@dataclass(slots=True)
class _Move:
    exchange: Exchange
    layer: LiveLayer
    stage: _Stage
    given: int = 0  # bytes, of each direction, that were given to the DMA
    mark: Mark | None = None  # after the last of them


class LiveExchange:
    """One thread calls it, between steps. layers: None for those that live on one side only."""

    def __init__(
        self,
        layers: Sequence[LiveLayer | None],
        copies: Copies,
        bytes_per_step: int,
        stages: int | None = None,
    ) -> None:
        self._layers, self._copies, self._bytes_per_step = list(layers), copies, bytes_per_step
        largest = max((layer.gpu.bytes_per_expert for layer in layers if layer), default=1)
        if stages is None:
            stages = max(LEAST_STAGES, min(MOST_STAGES, STAGING_BYTES // largest))
        self._free = [_Stage(copies, largest) for _ in range(stages)]
        self._queue: deque[Exchange] = deque()
        self._moves: list[_Move] = []
        self._lost: list[_Stage] = []  # kept: copies may still write there

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._moves)

    def add(self, exchanges: Iterable[Exchange]) -> None:
        self._queue.extend(exchanges)

    def advance(self, ending: bool = True) -> Settled:
        """Ends what has arrived, begins what is queued, and gives the DMA this step's bytes.

        ending: False leaves what has arrived for later, unless others wait for its staging memory: telling everybody
        costs as much for one as for many.
        """
        settled = Settled()
        if ending or (self._queue and not self._free):
            self._end(settled)
        budget = self._continue(self._bytes_per_step, settled)
        while self._queue and self._free and budget > 0:
            self._begin(self._queue.popleft(), settled)
            budget = self._continue(budget, settled)
        if self._queue and not self._free and not self._moves:  # every stage was lost to failures
            settled.dropped.extend(self._queue)
            self._queue.clear()
        return settled

    def _end(self, settled: Settled) -> None:
        waiting = []
        for move in self._moves:
            try:
                arrived = move.mark is not None and move.mark.passed()
            except Exception as error:
                self._drop(move, error, settled)
                continue
            if arrived:
                self._commit(move, settled)
                self._free.append(move.stage)
            else:
                waiting.append(move)
        self._moves = waiting

    def _begin(self, exchange: Exchange, settled: Settled) -> None:
        layer, stage = self._layers[exchange.layer], self._free.pop()
        try:
            if layer is None or layer.gpu.slot_of_expert(exchange.leaving) != exchange.slot:
                raise ValueError(f"expert {exchange.leaving} is not in slot {exchange.slot}")
            if any(_share_an_expert(move.exchange, exchange) for move in self._moves):
                raise ValueError("one of them is under way")
            nbytes = layer.gpu.bytes_per_expert
            layer.cpu.copy_packed(exchange.coming, plain(stage.coming[:nbytes]))
            self._copies.follow()
        except Exception as error:
            self._free.append(stage)  # nothing was given to the DMA
            _refuse(exchange, error, settled)
            return
        self._moves.append(_Move(exchange, layer, stage))

    def _continue(self, budget: int, settled: Settled) -> int:
        """Gives pieces of the moves to the DMA, the oldest first; returns what is left of the budget."""
        for move in list(self._moves):
            left = move.layer.gpu.bytes_per_expert - move.given
            piece = min(left, max(1, budget // 2)) if budget > 0 else 0
            if not piece:
                continue
            try:
                self._give(move, piece)
            except Exception as error:
                self._moves.remove(move)
                self._drop(move, error, settled)
            budget -= 2 * piece
        return budget

    def _give(self, move: _Move, piece: int) -> None:
        part, stage = slice(move.given, move.given + piece), move.stage
        self._copies.upload(stage.coming[part], stage.there[part])
        self._copies.download(move.layer.gpu.slot(move.exchange.slot)[part], stage.leaving[part])
        move.given += piece
        if move.given == move.layer.gpu.bytes_per_expert:
            move.mark = self._copies.mark()

    def _drop(self, move: _Move, error: Exception, settled: Settled) -> None:
        self._lost.append(move.stage)
        _refuse(move.exchange, error, settled)

    def _commit(self, move: _Move, settled: Settled) -> None:
        (_, slot, leaving, coming), gpu, cpu = move.exchange, move.layer.gpu, move.layer.cpu
        nbytes = gpu.bytes_per_expert
        try:
            cpu.load_packed(leaving, plain(move.stage.leaving[:nbytes]))
            try:
                gpu.point(leaving, -1)
            except Exception:
                cpu.forget(leaving)
                raise
        except Exception as error:
            return _refuse(move.exchange, error, settled)
        try:
            gpu.slot(slot).copy_(move.stage.there[:nbytes])
            gpu.point(coming, slot)
        except Exception:
            _log.exception("slot %d of MoE layer %d on the GPU is lost", slot, move.exchange.layer)
            self._layers[move.exchange.layer] = None  # its spare place is taken
            settled.stranded.append(move.exchange)
            return
        cpu.forget(coming)
        settled.done.append(move.exchange)


def _share_an_expert(one: Exchange, other: Exchange) -> bool:
    return one.layer == other.layer and bool({one.leaving, one.coming} & {other.leaving, other.coming})


def _refuse(exchange: Exchange, error: Exception, settled: Settled) -> None:
    _log.warning(
        "experts %d and %d of MoE layer %d stay where they are: %s", *exchange[2:], exchange[0], error
    )
    settled.dropped.append(exchange)
