"""`HybridExperts`: one layer's experts, some on the GPU and some in CPU memory, computed at the same time.

The only place that knows both sides. An expert is packed once and lives in one place: those on the GPU take no CPU
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.experts.cpu_experts import CpuExperts
from tandem.experts.deferral import Deferral
from tandem.experts.feed import LayerFeed
from tandem.experts.handoff import Handoff
from tandem.experts.live.exchange import LiveLayer
from tandem.experts.residency import Location, count_on, experts_on
from tandem.experts.sides import DeviceExperts, HostExperts, Side
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.ops import ExpertBiases, Routing, SureRead
from tandem.kernels.packed.cache import KeptLayer

if TYPE_CHECKING:
    from tandem.experts.streaming.stream import ExpertStream
    from tandem.kernels.gpu.experts import GpuExperts, PartialSums

LEAST_EXPECTED = 0.75
"""Foresight asks nothing where the CPU is expected to compute fewer experts of a step than this, if all are used alike:
the GPU would end last, and asking the next router takes 5 us of it. Beside an H200, in one run, tokens/s without and
with: 0.4 experts 337, 318; 0.8: 288, 295; 1.2: 257, 268; of 4 rows 1.6: 783, 785; 3.2: 611, 679."""


@dataclass(frozen=True, slots=True)
class HybridTicket:
    """A batch under way: each pair's slot on the GPU or -1, what the GPU's experts add, whether the CPU has a part, and
    whether experts are streamed meanwhile."""

    slots: Tensor
    partial: PartialSums | None
    dtype: torch.dtype
    posted: bool
    streamed: bool = False


def _nothing(*_: object) -> None:
    """Where the CPU has no part in a layer."""


class HybridExperts:
    """`submit` hands the CPU its pairs and computes the GPU's; `wait` adds both sums. stream: brings experts from CPU
    memory to the GPU in steps of many rows; index: which of its layers this is."""

    stream: ExpertStream | None = None
    index = 0

    def __init__(
        self,
        slot_of: Tensor,
        gpu: GpuExperts | None,
        cpu: PackedExperts | None,
        handoff: Handoff,
        whole: Callable[[], PackedExperts] | None = None,
        own_memory: bool = False,
        shared: int = 0,
    ) -> None:
        """slot_of int32 [experts]: the slot of those on the GPU, else -1. A side without experts is None. whole: makes
        an empty layer of all of them in CPU memory, for packed caches. own_memory: they are
        not used in a file, for they may change places, or be streamed. shared: how many of the last ones are on the GPU
        and every row's, chosen by no router."""
        self._slot_of, self._gpu, self._cpu, self._handoff, self._whole = slot_of, gpu, cpu, handoff, whole
        self._sides: list[Side] = []
        if gpu is not None:
            self._sides.append(DeviceExperts(gpu, experts_on(Location.GPU, slot_of)))
        if cpu is not None:
            self._sides.append(HostExperts(cpu, experts_on(Location.CPU, slot_of), own_memory))
        self._table = slot_of.to(handoff.device) if gpu is None else gpu.table
        self._number, self._shared = -1 if cpu is None else handoff.add(cpu), shared
        routed, chosen = len(slot_of) - shared, handoff.sizes.top_k - shared
        self._expected = chosen * count_on(Location.CPU, slot_of) / routed  # on the CPU, of a row

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None:
        """Packs each where it lives; for a packed cache all in CPU memory first, a layer at a
        time: the file holds every expert, wherever the next start puts it."""
        if cache is not None and self._whole is not None:
            packed = self._load_cached(feed, cache, self._whole())
            for side in self._sides:
                side.take(packed)
        else:
            self._pack(feed)
        for side in self._sides:
            side.loaded()

    def set_biases(self, biases: ExpertBiases) -> None:
        """Both sides have all of them: an expert that changes places finds its own there."""
        for side in self._sides:
            side.set_biases(biases)

    def _pack(self, feed: LayerFeed) -> None:
        for first, run in feed.runs():
            for side in self._sides:
                ids = [expert for expert in side.experts if first <= expert < first + len(run)]
                if ids:
                    side.load_each(ids, [run[expert - first] for expert in ids])

    def _load_cached(self, feed: LayerFeed, cache_layer: KeptLayer, whole: PackedExperts) -> PackedExperts:
        cache_layer.cache.wait()  # the layer before: its memory is free now
        CpuExperts(whole).load(feed, cache_layer)
        return whole

    @property
    def cpu(self) -> PackedExperts | None:
        """Those in CPU memory."""
        return self._cpu

    @property
    def gpu(self) -> GpuExperts | None:
        """Those on the GPU."""
        return self._gpu

    def end_step(self) -> None:
        """No layer of a step asks the CPU after this one; posts that are recorded from now on say so."""
        self._handoff.last = self._number

    def defer(self, most: int) -> None:
        """In graphs, up to `most` of a token's experts are deferred (`deferral`)."""
        routed = self._handoff.sizes.top_k - self._shared
        self._handoff.defer(self._number, Deferral(max(0, routed - most), routed))

    @property
    def sides(self) -> LiveLayer | None:
        """Both sides, for exchanges between them; None where one side has no experts."""
        return None if self._gpu is None or self._cpu is None else LiveLayer(self._gpu, self._cpu)

    @property
    def slot_of(self) -> Tensor:
        """int32 [experts] on the GPU: where each lies there, or -1. Exchanges change it in place."""
        return self._table

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        return self._sides[0].expert_bytes

    def sure_read(self, experts: int) -> SureRead:
        """For a GPU the order of reads means nothing; shared experts live there."""
        return self._sides[0].sure_read(experts)

    def takes_predictions(self, rows: int) -> bool:
        return self._expected * rows >= LEAST_EXPECTED and self._handoff.takes_predictions(rows)

    def prefetch(self, routing: Routing) -> None:
        """Before the next `submit`, after that of the layer before; slots as `slot_of` says."""
        self._handoff.prefetch(self._number, routing)

    def submit(self, x: Tensor, routing: Routing) -> HybridTicket:
        """x bfloat16 [T, hidden], routing [T, k], on the GPU; ids in [0, experts), as a router chooses them."""
        slots = routing.slots
        if slots is None:
            slots = self._table.index_select(0, routing.ids.flatten()).view_as(routing.ids)
        if self.stream is not None and self.index in self.stream.counts:
            return self._submit_streamed(self.stream, x, routing, slots)
        if self._cpu is not None:
            self._handoff.post(self._number, x, routing, slots)
        gpu_only, sums = self._cpu is None, None
        if self._gpu is not None:
            sums = self._gpu.partial(x, Routing(routing.ids, routing.weights, slots), gpu_only)
        return HybridTicket(slots, sums, x.dtype, not gpu_only)

    def _submit_streamed(
        self, stream: ExpertStream, x: Tensor, routing: Routing, slots: Tensor
    ) -> HybridTicket:
        """The CPU gets what neither is on the GPU nor streamed there."""
        keys, shared = stream.keys(self.index, routing.ids, slots), stream.leaves_some(self.index)
        if shared:
            self._handoff.copies.send(x, routing, keys)
        stream.before_experts(self.index, self._sent if shared else _nothing)
        sums = stream.compute(self.index, x, keys, routing)
        return HybridTicket(keys, sums, x.dtype, shared, streamed=True)

    def _sent(self) -> None:
        self._handoff.copies.sent(self._handoff.layers[self._number])

    def _compute(self, rows: int) -> None:
        self._handoff.copies.compute(rows)

    def wait(self, ticket: HybridTicket) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        cpu_sums, rows = None, len(ticket.slots)
        if ticket.streamed and self.stream is not None:
            self.stream.after_experts(self.index, self._compute if ticket.posted else _nothing, rows)
            cpu_sums = self._handoff.copies.result(rows) if ticket.posted else None
        elif ticket.posted:
            cpu_sums = self._handoff.collect(rows)
        if ticket.partial is not None:
            return ticket.partial.combined(cpu_sums)
        assert cpu_sums is not None
        return cpu_sums.to(ticket.dtype)
