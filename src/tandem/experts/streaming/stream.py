"""`ExpertStream`: experts in CPU memory are streamed to a ring of slots on the GPU, ahead of the layers that use them.

Both sides read the same bytes, so plain copies from the experts' own memory fill a part of the ring. A copy takes a
whole run of slots. The host gives it before its part is free: the bus waits for the GPU's marks by itself. So it never
waits for Python as long as the ring holds a layer's parts.

   copies   [layer 0: part 0][part 1][part 2] [layer 1: part 0][part 1] ...
   compute  [attention, router 0][experts on the GPU][part 0][part 1][part 2][attention, router 1] ...

Places are copied whatever lies in them, so nobody asks which experts a layer will use. Those that had most rows lately
are streamed first, and the CPU has the rest. The table of keys says which experts are streamed, and where each was when
the step began. So graphs of layers know nothing of how many are. Exchanges change no table while a step is given.
Meanwhile they write to spare slots only, which no table names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.experts.residency import NO_SLOT
from tandem.experts.streaming.copy_stream import CopyStream
from tandem.experts.streaming.key_tables import KeyTables
from tandem.experts.streaming.transfer_order import TransferOrder
from tandem.experts.streaming.transfers import Run, Transfers
from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.experts import GpuExperts, PartialSums
from tandem.kernels.gpu.ops import GpuOps
from tandem.kernels.gpu.panels import Panels
from tandem.kernels.gpu.prompts.order import keyed
from tandem.kernels.gpu.prompts.products import ExpertGroup, PromptExperts
from tandem.kernels.gpu.prompts.unpack import Packed
from tandem.kernels.ops import Routing
from tandem.kernels.packed.experts import PackedExperts
from tandem.planner.forecast.stream_rates import StreamRates
from tandem.spec.gpu_scratch import MOST_SHARED_SECONDS, StagingRing

Ints = npt.NDArray[np.int64]
NEARLY = 0.015  # shares that are so near to each other are the same: copies would be listed anew for little


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """One that has experts in CPU memory. residents: parts that are on the GPU, whose keys come first; gpu_slots: as
    `GpuExperts.slot_of`, None where no expert is there."""

    cpu: PackedExperts
    prompts: PromptExperts
    residents: tuple[ExpertGroup, ...]
    gpu_slots: Tensor | None = None
    _pieces: list[Ints] = field(default_factory=list, repr=False, compare=False)  # of all slots, once asked for

    @property
    def cpu_slots(self) -> int:
        return self.cpu.cpu_slots or self.cpu.num_experts

    @property
    def first_key(self) -> int:
        """First key of the streamed experts."""
        return sum(part.count for part in self.residents)

    def runs(self, cpu_slots: Iterable[int]) -> list[Run]:
        """Copies of these slots; what lies side by side on both sides is one."""
        pieces = self._all_pieces()[np.fromiter(cpu_slots, np.int64)]
        offsets, sources, sizes = (pieces[:, :, column].ravel() for column in range(3))
        targets = offsets + np.repeat(np.arange(len(pieces)) * self.cpu.bytes_per_expert, pieces.shape[1])
        first = np.ones(len(sources), bool)  # of a run
        first[1:] = (sources[1:] != (sources + sizes)[:-1]) | (targets[1:] != (targets + sizes)[:-1])
        starts = np.flatnonzero(first)
        lengths = np.add.reduceat(sizes, starts) if len(starts) else sizes
        return list(zip(sources[starts].tolist(), targets[starts].tolist(), lengths.tolist(), strict=True))

    def _all_pieces(self) -> Ints:
        """As `PackedExperts.pieces`, [slots, pieces, 3]; slots never move."""
        if not self._pieces:
            self._pieces.append(np.array([self.cpu.pieces(slot) for slot in range(self.cpu_slots)], np.int64))
        return self._pieces[0]

    def expert_cpu_slots(self, moving: bool = False) -> list[int]:
        """Each expert's place; -1 where it is on the GPU, or not in CPU memory. Those with a slot on the GPU are not
        asked for: what is not in CPU memory answers with an error, which takes 4 us, and they are many. moving: they
        are where one may have both. One that comes has a slot before the GPU's tables say so, and nobody would compute
        it."""
        loaded = self.cpu.loaded  # first: whoever leaves is in CPU memory before its slot is gone
        slots = [] if self.gpu_slots is None else self.gpu_slots.tolist()
        slots = slots[: self.cpu.num_experts] + [NO_SLOT] * (self.cpu.num_experts - len(slots))
        every = moving and loaded != slots.count(NO_SLOT)
        return [cpu_slot_of(self.cpu, i) if every or slot == NO_SLOT else -1 for i, slot in enumerate(slots)]


def streamed_layer(
    cpu: PackedExperts | None, gpu: GpuExperts | None, ops: GpuOps
) -> StreamedLayer | None:
    """None where no expert is in CPU memory, or the GPU's products cannot read them. ops: the engine's, whose layers
    have one scratch."""
    if cpu is None:
        return None
    if gpu is not None and gpu.prompts is None:
        return None
    between = ExpertActivation(cpu.width, cpu.activation)
    if cpu.biases is not None:
        between = between.biased(cpu.biases, ops.device)
    gate_up, down = (Panels(*layout) for layout in cpu.layout())
    if not PromptExperts.reads((gate_up, down), between):
        return None
    if gpu is not None and gpu.prompts is not None:
        return StreamedLayer(cpu, gpu.prompts, tuple(gpu.parts()), gpu.slot_of)
    prompts = PromptExperts(gate_up, down, between, ops.device, cpu.num_experts)
    prompts.scratch = ops.scratch
    return StreamedLayer(cpu, prompts, ())


def cpu_slot_of(layer: PackedExperts, expert: int) -> int:
    """-1 where it is not loaded."""
    try:
        return layer.cpu_slot_of(expert)
    except ValueError:
        return -1


class Layers(Enum):
    """How a step's are given to the GPU. Kernel by kernel; as graphs of layers whose experts are all streamed, if any
    are, for nobody may wait for the CPU; or of layers that bus and CPU share."""

    GIVEN, WHOLE, SPLIT = range(3)


def _nothing() -> int:
    return 0


class Cuts(Protocol):
    """Recorder of what is captured, into several graphs."""

    def cut(self, then: Callable[[], None]) -> None:
        """A graph ends here, and another begins. Whoever replays them calls `then` between the two."""
        ...


class PendingCounts(Protocol):
    """On their way."""

    def tokens(self) -> npt.NDArray[Any]:
        """[layers, experts]: rows of each since the start, modulo 2^32."""
        ...


class StreamReadings(NamedTuple):
    """Readings that the stream takes before a step. moves: changes when experts have changed places, None while they
    may be changing; served: seconds that the CPU has computed experts since the start. ask: for the rows of each
    expert, in the order of what the GPU computes."""

    moves: Callable[[], int | None] = _nothing
    served: Callable[[], float] = _nothing
    ask: Callable[[], PendingCounts] | None = None


class ExpertStream:
    """One for all layers of a model, which run in order. `begin` before each step; then each layer asks for its own."""

    def __init__(
        self,
        layers: Sequence[StreamedLayer | None],
        ring: StagingRing,
        bus: CopyStream,
        rates: StreamRates,
        device: torch.device,
        followed: StreamReadings = StreamReadings(),
    ) -> None:
        """layers: None for those without experts in CPU memory. The device is the memory's."""
        self._layers, self.rates, self._followed = layers, rates, followed
        width = max(layer.cpu.num_experts for layer in layers if layer)
        self._tables = KeyTables(len(layers), width, device)
        self._order = TransferOrder(layers)
        self._pending_counts: PendingCounts | None = None  # after the last step in which experts were streamed
        self.deliveries = Transfers(layers, ring, bus, device)
        self.holds_layers = ring.holds(max(layer.cpu_slots for layer in layers if layer is not None))
        """Whether the ring holds all that a layer waits for, and the bus can go on meanwhile."""
        self._cuts: Cuts | None = None  # while graphs of layers are captured
        self.rows = 0  # of this step
        self.counts: dict[int, int] = {}
        """How many slots of each layer are streamed in this step; empty: none is."""
        self._cpu_slots = sum(layer.cpu_slots for layer in layers if layer is not None)
        self._last: tuple[int, float] | None = None  # rows of the step before, and its share; None: it says nothing
        self._shared = 0, 0.0  # likewise, of the last step that could stream
        self._served = 0.0  # what `StreamReadings.served` said before it

    @property
    def step_seconds(self) -> float:
        """Seconds that the bus takes in a step in which all are streamed."""
        return self.rates.bus * sum(layer is not None for layer in self._layers)

    def begin(self, rows: int, shared: bool = False, layers: Layers = Layers.GIVEN) -> None:
        """Before a step of so many rows; 0: one that is recorded or replayed, in which nothing is streamed. shared:
        others wait in it for their next token."""
        self._learn()
        if rows:
            self._reorder()
        long = shared and self.rates.least_rows is None and self.step_seconds > MOST_SHARED_SECONDS
        self.rows, share = rows, self._share(0 if long else rows, layers is Layers.SPLIT)
        share = 1.0 if layers is Layers.WHOLE and share > 0 else share
        self.counts = _planned(self._layers, share, layers is Layers.SPLIT)
        if rows and not long and layers is not Layers.WHOLE:  # there others use the CPU meanwhile
            self._last = rows, sum(self.counts.values()) / self._cpu_slots
        for index, count in self.counts.items():
            if (cpu_slots := self._order.arranged(index, count)) is not None:
                self._tables.rank(index, cpu_slots)
                self.deliveries.reorder(index, cpu_slots)
        if self.counts:
            self._tables.tell(self._layers, self.counts)
        self.deliveries.begin(self.counts, whole=layers is not Layers.GIVEN)

    def begin_only(self, rows: int, layers: Iterable[int]) -> None:
        """Before a step that loads kernels: all experts of these layers alone are streamed. Its times say nothing."""
        self.rows, self._last = rows, None
        by_index = {index: self._layers[index] for index in layers}
        self.counts = {index: layer.cpu_slots for index, layer in by_index.items() if layer is not None}
        if self.counts:
            self._tables.look(self._layers, self._followed.moves())
            self._tables.tell(self._layers, self.counts)
        self.deliveries.begin(self.counts, whole=False)

    def _reorder(self) -> None:
        """By what the step before has counted, which the GPU has told."""
        self._tables.look(self._layers, self._followed.moves())
        if self._pending_counts is None:
            return
        self._order.learn(self._pending_counts.tokens(), self._tables.cpu_slots)
        self._pending_counts, self.rates.left = None, self._order.left

    def may_split(self, rows: int) -> bool:
        """Whether `splits` may say so later."""
        return self.rates.may_share(rows)

    def splits(self, rows: int) -> bool:
        """Whether bus and CPU share the experts of such a step, where its layers are graphs."""
        self._learn()
        self._reorder()
        return 0.0 < self.rates.share(rows, in_graphs=True) < 1.0

    def _learn(self) -> None:
        """From the step before, once. First: a new order says nothing about the rows that the CPU had in that step."""
        last, cpu_seconds = self._last, self._followed.served()
        if last is not None and not self.deliveries.failed:  # else the step's times say nothing
            count = sum(layer is not None for layer in self._layers)
            self.rates.observe(*last, (cpu_seconds - self._served) / count, self._rows_left())
        self._last, self._served = None, cpu_seconds

    def _rows_left(self) -> float | None:
        """Share of the rows that the CPU had in the step before; None: nobody has counted them."""
        if self._pending_counts is None or not self.counts:
            return None
        return self._tables.rows_left(self._order.new_rows(self._pending_counts.tokens()))

    def _share(self, rows: int, in_graphs: bool) -> float:
        """Share of experts that are streamed."""
        if not rows:
            return 0.0
        (before, near), share = self._shared, self.rates.share(rows, in_graphs)
        self._shared = rows, near if before == rows and abs(share - near) < NEARLY and 0 < share < 1 else share
        return self._shared[1]

    def keys(self, index: int, ids: Tensor, slots: Tensor) -> Tensor:
        """int32 [T, k]: of pairs of the layer `index`; -1 for those that the CPU computes."""
        return keyed(ids, slots, self._tables.of(index))

    def compute(self, index: int, x: Tensor, keys: Tensor, routing: Routing) -> PartialSums:
        """The sum over each token's experts that are on the GPU or streamed."""
        layer = _layer(self._layers, index)
        parts = [*layer.residents, *self._parts(index, layer)]
        return PartialSums(layer.prompts(x, keys, routing, parts), None)

    def leaves_some(self, index: int) -> bool:
        """Whether the CPU has a part of the layer `index`."""
        layer = self._layers[index]
        return layer is not None and self.counts[index] < layer.cpu_slots

    def _parts(self, index: int, layer: StreamedLayer) -> list[ExpertGroup]:
        numbers = self.deliveries.of(index)
        if self._cuts is None and (not numbers or numbers[0] != self.deliveries.released):
            raise EngineError(f"layer {index} is not the one whose experts have been sent")
        return [self._part(i, i - numbers[0], layer) for i in numbers]

    def _part(self, number: int, part: int, layer: StreamedLayer) -> ExpertGroup:
        """part: among the layer's parts."""
        packed = Packed(self.deliveries.memory(number), layer.cpu.bytes_per_expert, 0)
        count, cuts = self.deliveries.count(number), self._cuts
        if cuts is None:
            return ExpertGroup(packed, count, partial(self.deliveries.arrive, number), partial(self._read, number))
        if part == 0 or self.holds_layers:
            return ExpertGroup(packed, count)
        return ExpertGroup(packed, count, lambda: cuts.cut(partial(self._pass_on, number)))

    def _read(self, number: int) -> None:
        self.deliveries.read(number)
        if self.deliveries.ended and self._followed.ask is not None:
            self._pending_counts = self._followed.ask()  # every layer has routed its rows

    # -- what the host does around a layer's experts: at once, or at each replay of graphs that end there ---

    @contextmanager
    def recording(self, cuts: Cuts) -> Iterator[None]:
        """Around a capture after `begin`: nothing is waited for or given. Cuts around a layer's experts do that."""
        self._cuts = cuts
        try:
            yield
        finally:
            self._cuts = None
            self._last = None  # made-up rows choose too few experts: their times say nothing

    def before_experts(self, index: int, sent: Callable[[], None]) -> None:
        """After what names the experts of a layer, before what computes them. sent: the CPU's rows are on their way."""
        if self._cuts is None:
            sent()  # each part waits for its own experts
        else:
            self._cuts.cut(partial(self._arrive, index, sent))

    def after_experts(self, index: int, compute: Callable[[int], None], rows: int) -> None:
        """Before what adds the CPU's sums, which it makes of so many first rows. Where graphs are replayed, of a step's
        own: rows that only fill a graph up are not the CPU's."""
        if self._cuts is None:
            compute(rows)
        else:
            self._cuts.cut(partial(self._leave, index, compute))

    def _arrive(self, index: int, sent: Callable[[], None]) -> None:
        """Before experts of a layer are computed by a graph; or by several, and this is the first."""
        sent()
        numbers = self.deliveries.of(index)
        for number in numbers if self.holds_layers else numbers[:1]:
            self.deliveries.arrive(number)

    def _leave(self, index: int, compute: Callable[[int], None]) -> None:
        """After it, or the last."""
        numbers = self.deliveries.of(index)
        for number in numbers if self.holds_layers else numbers[-1:]:
            self._read(number)
        compute(self.rows)

    def _pass_on(self, number: int) -> None:
        """A ring that does not hold a layer has a graph for each part. The one before has read its own."""
        self._read(number - 1)
        self.deliveries.arrive(number)


def _layer(layers: Sequence[StreamedLayer | None], index: int) -> StreamedLayer:
    layer = layers[index]
    assert layer is not None
    return layer


def _planned(layers: Sequence[StreamedLayer | None], share: float, split: bool) -> dict[int, int]:
    """Places that are streamed, by layer. split: both sides have a part of every layer, as its graph expects."""
    if share <= 0 and not split:
        return {}
    cpu_slots = {i: layer.cpu_slots for i, layer in enumerate(layers) if layer is not None}
    if split:
        return {i: max(1, min(round(share * count), count - 1)) for i, count in cpu_slots.items()}
    return {i: round(share * count) for i, count in cpu_slots.items() if round(share * count)}
