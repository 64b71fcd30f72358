"""`ExpertStream`: experts in CPU memory travel to a ring of places on the GPU, ahead of the layers that use them.

Both sides read the same bytes, so plain copies from the experts' own memory fill a part of the ring. A copy takes a
whole run of places. The host gives it before its part is free: the bus waits for the GPU's marks by itself. So it never
waits for Python as long as the ring holds a layer's parts.

   copies   [layer 0: part 0][part 1][part 2] [layer 1: part 0][part 1] ...
   compute  [attention, router 0][experts on the GPU][part 0][part 1][part 2][attention, router 1] ...

Places are copied whatever lies in them, so nobody asks which experts a layer will use; the table of keys says who
travels, and was where when the step began. So graphs of layers know nothing of how many do. Exchanges change no table
while a step is given. Meanwhile they write to spare places only, which no table names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.config.forecast.stream_rates import StreamRates
from tandem.config.gpu_scratch import MOST_SHARED_SECONDS, Ring
from tandem.errors import EngineError
from tandem.experts.streams.bus import Bus
from tandem.experts.streams.key_tables import KeyTables
from tandem.kernels.gpu.expert_rows import Between
from tandem.kernels.gpu.experts import GpuExperts, PartialSums
from tandem.kernels.gpu.panels import Panels
from tandem.kernels.gpu.prompts.order import keyed
from tandem.kernels.gpu.prompts.products import Part, PromptExperts
from tandem.kernels.gpu.prompts.unpack import Packed
from tandem.kernels.ops import Routing
from tandem.kernels.packed.experts import PackedExperts

Run = tuple[int, int, int]
"""Where copied from, where to in a part of the ring, and bytes."""


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """One that has experts in CPU memory. residents: parts that are on the GPU, whose keys come first."""

    cpu: PackedExperts
    prompts: PromptExperts
    residents: tuple[Part, ...]

    @property
    def places(self) -> int:
        return self.cpu.places or self.cpu.num_experts

    @property
    def first_key(self) -> int:
        """Of what travels."""
        return sum(part.count for part in self.residents)

    def runs(self, first: int, count: int) -> list[Run]:
        """Copies of places [first, first + count); what lies side by side on both sides is one."""
        made: list[Run] = []
        for i in range(count):
            for offset, source, nbytes in self.cpu.pieces(first + i):
                target = i * self.cpu.bytes_per_expert + offset
                if made and made[-1][0] + made[-1][2] == source and made[-1][1] + made[-1][2] == target:
                    source, target, nbytes = *made[-1][:2], made.pop()[2] + nbytes
                made.append((source, target, nbytes))
        return made

    def found(self) -> list[int]:
        """Each expert's place; -1 where it is not in CPU memory."""
        return [place_of(self.cpu, expert) for expert in range(self.cpu.num_experts)]


def streamed_layer(
    cpu: PackedExperts | None, gpu: GpuExperts | None, device: torch.device
) -> StreamedLayer | None:
    """None where no expert is in CPU memory, or the GPU's products cannot read them."""
    if cpu is None:
        return None
    if gpu is not None and gpu.prompts is None:
        return None
    between = Between(cpu.width, cpu.activation)
    if cpu.biases is not None:
        between = between.biased(cpu.biases, device)
    gate_up, down = (Panels(*layout) for layout in cpu.layout())
    if not PromptExperts.reads((gate_up, down), between):
        return None
    if gpu is not None and gpu.prompts is not None:
        return StreamedLayer(cpu, gpu.prompts, tuple(gpu.parts()))
    return StreamedLayer(cpu, PromptExperts(gate_up, down, between, device, cpu.num_experts), ())


def place_of(layer: PackedExperts, expert: int) -> int:
    """-1 where it is not loaded."""
    try:
        return layer.place_of(expert)
    except ValueError:
        return -1


class Layers(Enum):
    """How a step's are given to the GPU. Kernel by kernel; as graphs of layers whose experts all travel, if any do, for
    nobody may wait for the CPU; or of layers that bus and CPU share."""

    GIVEN, WHOLE, SPLIT = range(3)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Places [first, first + count) of a layer, in one part of the ring."""

    layer: int
    first: int
    count: int


def _nothing() -> int:
    return 0


class Recorder(Protocol):
    """Records graphs of layers."""

    def cut(self, then: Callable[[], None]) -> None:
        """A graph ends here, and another begins. Whoever replays them calls `then` between the two."""
        ...


class Followed(NamedTuple):
    """What the stream looks at before a step. moves: changes when experts have changed places, None while they may be
    changing; served: seconds that the CPU has computed experts since the start."""

    moves: Callable[[], int | None] = _nothing
    served: Callable[[], float] = _nothing


class ExpertStream:
    """One for all layers of a model, which run in order. `begin` before each step; then each layer asks for its own."""

    def __init__(
        self,
        layers: Sequence[StreamedLayer | None],
        ring: Ring,
        bus: Bus,
        rates: StreamRates,
        device: torch.device,
        followed: Followed = Followed(),
    ) -> None:
        """layers: None for those without experts in CPU memory. The device is the memory's."""
        self._layers, self._ring, self._bus, self.rates, self._followed = layers, ring, bus, rates, followed
        self._memory = torch.empty(ring.nbytes, dtype=torch.uint8, device=device)
        width = max(layer.cpu.num_experts for layer in layers if layer)
        self._tables = KeyTables(len(layers), width, device)
        self._runs: dict[_Delivery, list[Run]] = {}  # places never move
        self._free: list[object] = [None] * ring.parts  # marks: the part was unpacked
        self._arrived: list[object] = [None] * ring.parts
        self._deliveries: list[_Delivery] = []
        self._of: dict[int, range] = {}  # numbers of a layer's
        self._given = self._taken = 0
        self.recorder: Recorder | None = None  # while graphs of layers are captured
        self.rows = 0  # of this step
        self._counts: dict[int, int] = {}  # places of each layer that travel in this step
        self._last: tuple[int, float] | None = None  # rows of the step before, and its share
        self._served = 0.0  # what `Followed.served` said before it
        self.streamed_bytes = 0  # since the start

    @property
    def counts(self) -> dict[int, int]:
        """How many places of each layer travel in this step; empty: none does."""
        return self._counts

    @property
    def step_seconds(self) -> float:
        """Of a step in which all travel: what the bus takes."""
        return self.rates.bus * sum(layer is not None for layer in self._layers)

    def copied_gbps(self) -> float:
        """Of the bus: a part of each layer from where it lies, between steps."""
        total, started = 0, perf_counter()
        for layer in (layer for layer in self._layers if layer is not None):
            for source, target, nbytes in layer.runs(0, min(self._ring.experts, layer.places)):
                self._bus.copy(source, self._memory.data_ptr() + target, nbytes)
                total += nbytes
        self._bus.finish()
        return total / (perf_counter() - started) / 1e9

    def begin(self, rows: int, shared: bool = False, layers: Layers = Layers.GIVEN) -> None:
        """Before a step of so many rows; 0: one that is recorded or replayed, in which nothing travels. shared: others
        wait in it for their next token."""
        if self._taken < self._given:  # a step has failed
            self._bus.finish()
            self._last = None  # its times say nothing
        long = shared and self.rates.least_rows is None and self.step_seconds > MOST_SHARED_SECONDS
        self.rows, share = rows, self._share(0 if long else rows, layers is Layers.SPLIT)
        share = 1.0 if layers is Layers.WHOLE and share > 0 else share
        self._last = None if layers is Layers.WHOLE else self._last  # others use the CPU meanwhile
        self._counts = _planned(self._layers, share, layers is Layers.SPLIT)
        self._deliveries, self._of = [], {}
        for layer in self._counts:
            first, made = len(self._deliveries), self._cut(layer, layers is not Layers.GIVEN)
            self._deliveries += made
            self._of[layer] = range(first, first + len(made))
        self._given = self._taken = 0
        if self._deliveries:
            self._tables.tell(self._layers, self._counts, self._followed.moves())
        for _ in range(self._ring.parts):
            self._give()

    def splits(self, rows: int) -> bool:
        """Whether bus and CPU share the experts of such a step, where its layers are graphs."""
        return 0.0 < self.rates.share(rows, in_graphs=True) < 1.0

    def _share(self, rows: int, in_graphs: bool) -> float:
        """Of experts that travel; and learns from the step before."""
        served, (before, least) = self._followed.served(), (self._last, self._served)
        if before is not None:
            count = sum(layer is not None for layer in self._layers)
            self.rates.observe(*before, (served - least) / count)
        share = self.rates.share(rows, in_graphs) if rows else 0.0
        self._last, self._served = (rows, share) if rows else None, served
        return share

    def _cut(self, layer: int, in_graphs: bool) -> list[_Delivery]:
        """in_graphs: parts for all places, whether all travel or not."""
        each, count = self._ring.experts, _layer(self._layers, layer).places if in_graphs else self._counts[layer]
        return [_Delivery(layer, first, min(each, count - first)) for first in range(0, count, each)]

    def _give(self) -> None:
        """The next part's copies, which begin when the part is free."""
        if self._given == len(self._deliveries):
            return
        delivery, turn = self._deliveries[self._given], self._given % self._ring.parts
        left = max(0, self._counts[delivery.layer] - delivery.first)
        self._given += 1
        self._bus.copy_after(self._free[turn])
        to = self._memory.data_ptr() + turn * self._ring.part_bytes
        for source, target, nbytes in self._runs_of(replace(delivery, count=min(left, delivery.count))):
            self._bus.copy(source, to + target, nbytes)
            self.streamed_bytes += nbytes
        self._arrived[turn] = self._bus.copies_given()

    def _runs_of(self, delivery: _Delivery) -> list[Run]:
        if delivery not in self._runs:
            self._runs[delivery] = _layer(self._layers, delivery.layer).runs(delivery.first, delivery.count)
        return self._runs[delivery]

    def keys(self, index: int, ids: Tensor, slots: Tensor) -> Tensor:
        """int32 [T, k]: of pairs of the layer `index`; -1 for those that the CPU computes."""
        return keyed(ids, slots, self._tables.of(index))

    def compute(self, index: int, x: Tensor, keys: Tensor, routing: Routing) -> PartialSums:
        """The sum over each token's experts that are on the GPU or travel."""
        layer = _layer(self._layers, index)
        parts = [*layer.residents, *self._parts(index, layer)]
        return PartialSums(layer.prompts(x, keys, routing, parts), None)

    def leaves_some(self, index: int) -> bool:
        """Whether the CPU has a part of the layer `index`."""
        layer = self._layers[index]
        return layer is not None and self._counts[index] < layer.places

    def _parts(self, index: int, layer: StreamedLayer) -> list[Part]:
        mine = self._of.get(index, range(0))
        if self.recorder is None and (not mine or mine[0] != self._taken):
            raise EngineError(f"layer {index} is not the one whose experts have been sent")
        return [self._part(i, layer) for i in mine]

    def _part(self, number: int, layer: StreamedLayer) -> Part:
        turn, count = number % self._ring.parts, self._deliveries[number].count
        pool = self._memory[turn * self._ring.part_bytes :]
        packed = Packed(pool, layer.cpu.bytes_per_expert, 0)
        if self.recorder is not None:
            return Part(packed, count)
        return Part(
            packed, count, lambda: self._bus.compute_after(self._arrived[turn]), lambda: self._read(number)
        )

    def _read(self, number: int) -> None:
        self._free[number % self._ring.parts] = self._bus.computing_given()
        self._taken += 1
        self._give()

    # -- graphs of layers ---

    @property
    def holds_layers(self) -> bool:
        """Whether the ring holds all that a layer waits for, and the bus can go on meanwhile."""
        return self._ring.holds(max(layer.places for layer in self._layers if layer is not None))

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Around a capture after `begin`: nothing is waited for or given. Cuts around a layer's experts do that."""
        self.recorder = recorder
        try:
            yield
        finally:
            self.recorder = None
            self._last = None  # made-up rows choose too few experts: their times say nothing

    def arrive(self, index: int) -> None:
        """Before experts of a layer are computed by a graph."""
        for number in self._of.get(index, ()):
            self._bus.compute_after(self._arrived[number % self._ring.parts])

    def leave(self, index: int) -> None:
        """After it."""
        for number in self._of.get(index, ()):
            self._read(number)


def _layer(layers: Sequence[StreamedLayer | None], index: int) -> StreamedLayer:
    layer = layers[index]
    assert layer is not None
    return layer


def _planned(layers: Sequence[StreamedLayer | None], share: float, split: bool) -> dict[int, int]:
    """Of each layer, how many places travel. split: both sides have a part of every layer, as its graph expects."""
    if share <= 0 and not split:
        return {}
    places = {i: layer.places for i, layer in enumerate(layers) if layer is not None}
    if split:
        return {i: max(1, min(round(share * count), count - 1)) for i, count in places.items()}
    return {i: round(share * count) for i, count in places.items() if round(share * count)}
