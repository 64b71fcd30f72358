"""`LiveExchange`: makes an expert on the GPU and one in CPU memory change places while the model serves.

Neither has a second copy anywhere, so both are used where they were until both have arrived:

   CPU place ──DMA──▶ GPU staging ─ ─▶ slot      the one that comes
   CPU spare ◀──DMA── slot                       the one that leaves

DMA reads and writes the experts' own CPU memory and runs beside the steps; no thread copies anything. Once both are
there:

1. The leaving expert lives in the spare place, and its entry in the GPU's tables becomes -1.
2. The slot is overwritten, and the coming expert's entry becomes the slot.
3. When the step has ended, the coming expert's old place is the layer's spare one.

Each of these leaves a placement that is right. An error before the slot is touched drops the exchange. All that are
copied together end together: the tables are copied twice for all of them. C++ does the work for each, a piece at a time
(`ExchangeTurn`): the engine's thread makes the copies while it waits for the step's last answer. The thread that
answers changes places between two answers. What is left is done after the step, for a while.

Memory: one spare place per layer on the CPU (1/128 or 1/512 of a layer), so a layer's exchanges follow each other. On
the GPU memory is scarce, so all layers share the staging there: a spare slot in each of 94 layers would be 1 GB of
Qwen3-235B in int4.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from tandem import _core
from tandem.experts.live.copies import ExchangeCopies
from tandem.experts.live.virtual import Exchange
from tandem.kernels.packed.experts import PackedExperts
from tandem.spec.gpu_scratch import exchange_buffers

_log = logging.getLogger(__name__)

TAIL_SECONDS = (
    50e-6  # after a step, for what was not done beside it: the GPU computes its logits for longer than that
)

Meanwhile = Callable[[_core.Meanwhile], None]
"""Has pieces of it done while a step runs."""


class Slots(Protocol):
    """A layer's experts on the GPU, as `kernels.gpu.experts.GpuExperts` has them."""

    slots: int  # how many
    slot_of: (
        Tensor  # int32 [experts] in CPU memory, -1: not on the GPU; changed here, for `Tables` to publish
    )

    @property
    def bytes_per_expert(self) -> int: ...

    def address(self, slot: int) -> int:
        """Address of a slot, bytes_per_expert bytes on the GPU; slots lie side by side."""
        ...


class Tables(Protocol):
    """Tables of all layers' `slot_of` that the GPU reads."""

    @property
    def copied(self) -> tuple[int, int, int]:
        """Address of their image in CPU memory and of what the GPU reads, and the bytes that one copy brings there."""
        ...


@dataclass(frozen=True, slots=True)
class LiveLayer:
    """Both sides of one layer. `cpu` has a place more than experts."""

    gpu: Slots
    cpu: PackedExperts


@dataclass(frozen=True, slots=True)
class ExchangeOutcome:
    """Outcome of exchanges: `stranded` ones put the leaving expert into CPU memory, but their slot is lost. ended:
    layers in which nothing can move from now on."""

    done: list[Exchange] = field(default_factory=list)
    dropped: list[Exchange] = field(default_factory=list)
    stranded: list[Exchange] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


class _Batch(NamedTuple):
    """Exchanges that are copied together, one of a layer at most."""

    turn: _core.ExchangeTurn
    exchanges: list[Exchange]
    buffers: list[int]  # addresses on the GPU
    failed: set[int]  # of these, what has failed


def _nobody(work: _core.Meanwhile) -> None:
    """Where nobody waits for posts."""


class LiveExchange:
    """One thread calls it: `end` and `prepare` when the CPU has done its part of a step, `begin` when the next was
    started. layers: None for those that live on one side only. buffers: experts on their way at once, as planned; None:
    as many as a large GPU has."""

    def __init__(
        self,
        layers: Sequence[LiveLayer | None],
        tables: Tables,
        copies: ExchangeCopies,
        bytes_at_once: int,
        buffers: int | None = None,
        between_answers: Meanwhile = _nobody,
        tail_seconds: float = TAIL_SECONDS,
    ) -> None:
        self._tables, self._copies, self.between_answers = tables, copies, between_answers
        self._tail_seconds = tail_seconds
        self._sides, self._layers = _moving(layers), list(layers)
        sizes = [layer.gpu.bytes_per_expert if layer else 0 for layer in layers]
        self._bytes = [2 * size for size in sizes]  # of an exchange
        self._bytes_at_once, self._budget = bytes_at_once, 0
        largest = max(1, *sizes)
        if buffers is None:
            buffers = exchange_buffers(largest)
        self._staging = copies.device_buffer(buffers * largest)
        self._free = [self._staging.data_ptr() + i * largest for i in range(buffers)]
        self._queue: deque[Exchange] = deque()
        self._batch: _Batch | None = None
        self._busy: set[int] = set()  # layers that have a move under way
        self._moved, self._seconds, self._overrun = 0, 0.0, 0.0  # of batches that have ended
        # The first copy of its kind may load code, which the driver waits for: not while a step waits for this thread.
        copies.in_order(self._free[0], self._free[-1], largest)
        copies.follow()

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._batch)

    @property
    def waiting(self) -> bool:
        """Whether there is anything to prepare."""
        return bool(self._queue and self._batch is None)

    @property
    def under_way(self) -> bool:
        """Whether there is anything to begin or to end."""
        return self._batch is not None

    def moves(self) -> int | None:
        """Changes whenever experts have changed places; None while something is under way: then they may at any time,
        after their bytes were counted."""
        return None if self.under_way else self.bytes_moved

    @property
    def bytes_moved(self) -> int:
        """Both ways, since the start."""
        return self._moved + (self._batch.turn.bytes_given if self._batch else 0)

    @property
    def beside_seconds(self) -> float:
        """That was worked piece by piece while steps ran, since the start."""
        return self._seconds + (self._batch.turn.seconds if self._batch else 0.0)

    @property
    def late_seconds(self) -> float:
        """Seconds of `beside_seconds` that pieces took beyond their time: the GPU may have waited for that."""
        return self._overrun + (self._batch.turn.late_seconds if self._batch else 0.0)

    def add(self, exchanges: Iterable[Exchange]) -> None:
        self._queue.extend(exchanges)

    # -- what begins ---

    def prepare(self) -> ExchangeOutcome:
        """Chooses what is copied next, `bytes_at_once` on average, whole experts; nothing while something does. What it
        raises leaves every expert where it was."""
        outcome = ExchangeOutcome()
        if self._batch is not None:
            return outcome
        self._budget = min(self._budget, 0) + self._bytes_at_once
        if self._queue and not self._free:  # every buffer was lost to failures
            outcome.dropped.extend(self._queue)
            self._queue.clear()
        exchanges, buffers = self._next()
        if exchanges:
            self._copies.follow()  # they overwrite buffers, and read slots, that earlier ones wrote
            self._batch = _Batch(self._turn(exchanges, buffers), exchanges, buffers, set())
        return outcome

    def _turn(self, exchanges: list[Exchange], buffers: list[int]) -> _core.ExchangeTurn:
        copies = self._copies
        streams = (*copies.directions, copies.computing())
        return _core.ExchangeTurn(
            self._sides, copies.functions, streams, self._tables.copied, exchanges, buffers
        )

    def begin(self) -> None:
        """A step was started: has the batch go on while that runs."""
        if self._batch is not None:
            self.between_answers(self._batch.turn)

    def _next(self) -> tuple[list[Exchange], list[int]]:
        """Exchanges and a buffer for each; others wait for their layer's that is under way."""
        exchanges: list[Exchange] = []
        buffers: list[int] = []
        waiting: deque[Exchange] = deque()
        while self._queue and self._free and self._budget > 0:
            exchange = self._queue.popleft()
            if exchange.layer in self._busy:
                waiting.append(exchange)
                continue
            self._busy.add(exchange.layer)
            self._budget -= self._bytes[exchange.layer]
            exchanges.append(exchange)
            buffers.append(self._free.pop())
        waiting.extend(self._queue)
        self._queue = waiting
        return exchanges, buffers

    # -- what ends ---

    def end(self) -> ExchangeOutcome:
        """Ends exchanges whose bytes have arrived: their experts change places. An error leaves every expert in one."""
        outcome, batch = ExchangeOutcome(), self._batch
        if batch is None:
            return outcome
        ended = batch.turn.run(self._tail_seconds)
        self._note(batch, outcome)
        if ended:
            self._close(batch, outcome)
        return outcome

    def _note(self, batch: _Batch, outcome: ExchangeOutcome) -> None:
        """Notes the batch's failures in `outcome`."""
        for index, fate, keeps_buffer, ends_layer, why in batch.turn.troubles():
            exchange = batch.exchanges[index]
            if ends_layer:
                outcome.ended.append(exchange.layer)
            if fate == "done":
                _log.error("MoE layer %d: %s", exchange.layer, why)
                continue
            batch.failed.add(index)
            self._busy.discard(exchange.layer)
            if not keeps_buffer:
                self._free.append(batch.buffers[index])
            _tell(exchange, fate, why, outcome)

    def _close(self, batch: _Batch, outcome: ExchangeOutcome) -> None:
        self._moved += batch.turn.bytes_given
        self._seconds += batch.turn.seconds
        self._overrun += batch.turn.late_seconds
        self._batch = None
        for index, exchange in enumerate(batch.exchanges):
            if index not in batch.failed:
                outcome.done.append(exchange)
                self._free.append(batch.buffers[index])
                self._busy.discard(exchange.layer)


def _moving(layers: Sequence[LiveLayer | None]) -> _core.MovingLayers:
    moving = _core.MovingLayers()
    for layer in layers:
        if layer is None:
            moving.add_none()
        else:
            gpu = layer.gpu
            moving.add(layer.cpu.core, gpu.slot_of.numpy(), gpu.address(0), gpu.slots)
    return moving


def _tell(exchange: Exchange, fate: str, why: str, outcome: ExchangeOutcome) -> None:
    layer, slot, leaving, coming = exchange
    if fate == "stranded":
        _log.error("slot %d of MoE layer %d on the GPU is lost: %s", slot, layer, why)
        outcome.stranded.append(exchange)
    else:
        _log.warning("experts %d and %d of MoE layer %d stay where they are: %s", leaving, coming, layer, why)
        outcome.dropped.append(exchange)
