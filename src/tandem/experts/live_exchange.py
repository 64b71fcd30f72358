"""`LiveExchange`: makes an expert on the GPU and one in CPU memory change places while the model serves.

Neither has a second copy anywhere, so both are used where they were until both have arrived:

   CPU place ──DMA──▶ GPU staging ─ ─▶ slot      the one that comes
   CPU spare ◀──DMA── slot                       the one that leaves

DMA reads and writes the experts' own CPU memory and runs beside the steps; no thread copies anything. Once both are
there, between two steps: the leaving expert's place becomes the spare one, its entry in the GPU's tables -1, the slot
is overwritten, the coming expert's entry becomes the slot, and its old place is the layer's spare one. Each of these
leaves a placement that is right; an error before the slot is touched drops the exchange. All that arrive together end
together: the tables are copied twice for all of them, and everything stands still for microseconds.

Memory: one spare place per layer on the CPU (1/128 or 1/512 of a layer there), so a layer's exchanges follow each
other; and staging for all layers on the GPU, whose memory is what there is little of: a spare slot in each of 94 layers
would be 1 GB of Qwen3-235B in int4.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.experts.live_copies import Copies, Mark
from tandem.experts.live_policy import Exchange
from tandem.kernels.packed_experts import PackedExperts

_log = logging.getLogger(__name__)

STAGING_BYTES = 96 << 20  # on the GPU
LEAST_STAGES, MOST_STAGES = 2, 64


class Slots(Protocol):
    """A layer's experts on the GPU, as `kernels.gpu.experts.GpuExperts` has them."""

    @property
    def bytes_per_expert(self) -> int: ...

    def address(self, slot: int) -> int:
        """Of bytes_per_expert bytes on the GPU."""
        ...

    def point(self, expert: int, slot: int) -> None:
        """The expert is in `slot`, -1: not on the GPU, from when `Tables` are published. Raises nothing."""
        ...

    def slot_of_expert(self, expert: int) -> int: ...


class Tables(Protocol):
    """What the GPU reads of all layers' `point`."""

    def publish(self, copies: Copies) -> None: ...


@dataclass(frozen=True, slots=True)
class LiveLayer:
    """Both sides of one layer. `cpu` has a place more than experts."""

    gpu: Slots
    cpu: PackedExperts


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of exchanges: `stranded` ones put the leaving expert into CPU memory, but their slot is lost. ended:
    layers in which nothing can move from now on."""

    done: list[Exchange] = field(default_factory=list)
    dropped: list[Exchange] = field(default_factory=list)
    stranded: list[Exchange] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Move:
    exchange: Exchange
    layer: LiveLayer
    stage: int  # address on the GPU
    place: int  # of the leaving expert
    slot: int  # address on the GPU


class LiveExchange:
    """One thread calls it: `end` between steps, `follow` before a step, `begin` when it was started. layers: None for
    those that live on one side only."""

    def __init__(
        self,
        layers: Sequence[LiveLayer | None],
        tables: Tables,
        copies: Copies,
        bytes_at_once: int,
        stages: int | None = None,
    ) -> None:
        self._layers, self._tables, self._copies = list(layers), tables, copies
        self._bytes_at_once, self._budget = bytes_at_once, 0
        largest = max((layer.gpu.bytes_per_expert for layer in layers if layer), default=1)
        if stages is None:
            stages = max(LEAST_STAGES, min(MOST_STAGES, STAGING_BYTES // largest))
        self._staging = copies.there(stages * largest)
        self._free = [self._staging.data_ptr() + i * largest for i in range(stages)]
        self._queue: deque[Exchange] = deque()
        self._batches: list[tuple[Mark, list[_Move]]] = []  # what was given to the DMA in one step
        self._busy: set[int] = set()  # layers that have a move under way
        self.bytes_moved = 0  # both ways, since the start

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._batches)

    def add(self, exchanges: Iterable[Exchange]) -> None:
        self._queue.extend(exchanges)

    # -- what begins ---

    def follow(self) -> None:
        """What `begin` begins comes after what the GPU was given until now."""
        if self._queue:
            self._copies.follow()

    def begin(self) -> Settled:
        """Gives the DMA the next exchanges: `bytes_at_once` on average, whole experts. What it raises leaves every
        expert where it was."""
        settled = Settled()
        self._budget = min(self._budget, 0) + self._bytes_at_once
        if self._queue and not self._free and not self._batches:  # every stage was lost to failures
            settled.dropped.extend(self._queue)
            self._queue.clear()
        if self._queue and self._budget > 0:
            self._begin_some(settled)
        return settled

    def _begin_some(self, settled: Settled) -> None:
        moves: list[_Move] = []
        waiting: deque[Exchange] = deque()  # for their layer's move under way
        while self._queue and self._free and self._budget > 0:
            exchange = self._queue.popleft()
            if exchange.layer in self._busy:
                waiting.append(exchange)
            else:
                self._begin(exchange, moves, settled)
        waiting.extend(self._queue)
        self._queue = waiting
        if moves:
            self._batches.append((self._copies.mark(), moves))

    def _begin(self, exchange: Exchange, moves: list[_Move], settled: Settled) -> None:
        layer, (_, slot, leaving, coming) = self._layers[exchange.layer], exchange
        try:
            if layer is None:
                raise ValueError("no experts move in this layer any more")
            if layer.gpu.slot_of_expert(leaving) != slot:
                raise ValueError(f"expert {leaving} is not in slot {slot}")
            there = layer.cpu.pieces(layer.cpu.place_of(coming))
            place = layer.cpu.reserve(leaving)
        except Exception as error:
            return _refuse(exchange, error, settled)
        move = _Move(exchange, layer, self._free.pop(), place, layer.gpu.address(slot))
        self._budget -= 2 * layer.gpu.bytes_per_expert
        before = self.bytes_moved
        try:
            self._give(move, there)
        except Exception as error:
            if self.bytes_moved > before:
                return self._lose(move, error, settled)
            layer.cpu.release(place)
            self._free.append(move.stage)
            return _refuse(exchange, error, settled)
        self._busy.add(exchange.layer)
        moves.append(move)

    def _give(self, move: _Move, coming: list[tuple[int, int, int]]) -> None:
        for offset, here, nbytes in coming:
            self._copies.upload(here, move.stage + offset, nbytes)
            self.bytes_moved += nbytes
        for offset, here, nbytes in move.layer.cpu.pieces(move.place):
            self._copies.download(move.slot + offset, here, nbytes)
            self.bytes_moved += nbytes

    def _lose(self, move: _Move, error: Exception, settled: Settled) -> None:
        """Copies may still write into its place and its staging memory: unless they have ended, nobody may use them
        again."""
        self._end_layer(move, settled)
        self._busy.discard(move.exchange.layer)
        _refuse(move.exchange, error, settled)

    def _end_layer(self, move: _Move, settled: Settled) -> None:
        """Its spare place is taken, by whatever that is."""
        self._layers[move.exchange.layer] = None
        settled.ended.append(move.exchange.layer)

    # -- what ends ---

    def end(self) -> Settled:
        """Between two steps: what has arrived changes places. What it raises leaves every expert where it was."""
        settled, waiting, arrived = Settled(), [], []
        for mark, moves in self._batches:
            try:
                passed = mark.passed()
            except Exception as error:
                for move in moves:
                    self._lose(move, error, settled)
                continue
            if passed:
                arrived.extend(moves)
            else:
                waiting.append((mark, moves))
        self._batches = waiting
        if arrived:
            self._commit(arrived, settled)
        for move in arrived:
            self._free.append(move.stage)
            self._busy.discard(move.exchange.layer)
        return settled

    def _commit(self, moves: list[_Move], settled: Settled) -> None:
        moves = [move for move in moves if self._settle(move, settled)]
        try:
            self._tables.publish(self._copies)
        except Exception as error:
            for move in moves:
                self._undo(move, error, settled)
            return
        placed = [move for move in moves if self._place(move, settled)]
        try:
            self._tables.publish(self._copies)
        except Exception:
            for move in placed:
                self._strand(move, settled)
            return
        for move in placed:
            self._forget(move, move.exchange.coming, settled)
            settled.done.append(move.exchange)

    def _settle(self, move: _Move, settled: Settled) -> bool:
        try:
            move.layer.cpu.settle(move.exchange.leaving, move.place)
        except Exception as error:
            self._lose(move, error, settled)
            return False
        move.layer.gpu.point(move.exchange.leaving, -1)
        return True

    def _forget(self, move: _Move, expert: int, settled: Settled) -> None:
        """It is on the GPU."""
        try:
            move.layer.cpu.forget(expert)
        except Exception:
            _log.exception("expert %d of MoE layer %d keeps its CPU memory", expert, move.exchange.layer)
            self._end_layer(move, settled)

    def _undo(self, move: _Move, error: Exception, settled: Settled) -> None:
        move.layer.gpu.point(move.exchange.leaving, move.exchange.slot)
        self._forget(move, move.exchange.leaving, settled)
        _refuse(move.exchange, error, settled)

    def _place(self, move: _Move, settled: Settled) -> bool:
        gpu, (_, slot, _, coming) = move.layer.gpu, move.exchange
        try:
            self._copies.in_order(move.stage, move.slot, gpu.bytes_per_expert)
        except Exception:
            self._strand(move, settled)
            return False
        gpu.point(coming, slot)
        return True

    def _strand(self, move: _Move, settled: Settled) -> None:
        index, slot, _, coming = move.exchange
        _log.exception("slot %d of MoE layer %d on the GPU is lost", slot, index)
        move.layer.gpu.point(coming, -1)
        self._end_layer(move, settled)
        settled.stranded.append(move.exchange)


def _refuse(exchange: Exchange, error: Exception, settled: Settled) -> None:
    _log.warning(
        "experts %d and %d of MoE layer %d stay where they are: %s", *exchange[2:], exchange[0], error
    )
    settled.dropped.append(exchange)
