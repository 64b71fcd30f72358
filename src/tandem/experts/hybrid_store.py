"""`HybridStore`: makes every layer's experts where an `ExpertPlacement` says."""

from __future__ import annotations

from functools import partial

import torch

from tandem.experts.handoff import Handoff
from tandem.experts.hybrid_experts import HybridExperts
from tandem.experts.placement import ExpertPlacement
from tandem.experts.residency import Location, count_on, slots_in_use
from tandem.experts.slot_tables import SlotTable, SlotTables
from tandem.kernels.gpu.ops import GpuOps
from tandem.spec.activation import SILU, Activation


class HybridStore:
    """Shared experts that count as routed ones (ids past them) always live on the GPU: every token uses them."""

    def __init__(
        self,
        ops: GpuOps,
        placement: ExpertPlacement,
        handoff: Handoff,
        hidden: int,
        live: bool = False,
        own_memory: bool = False,
    ) -> None:
        """live: experts may move later, for which a layer with routed ones on both sides has a spare place in CPU
        memory, as `planner/expert_sizes.py` counts them. own_memory: they are not used in a file, which DMA cannot
        read."""
        self._ops, self._placement, self._handoff, self._hidden = ops, placement, handoff, hidden
        self._live, self._own_memory = live, live or own_memory
        self.tables: SlotTables | None = None  # where experts may move, from the first layer on
        self.layers: dict[int, HybridExperts] = {}  # by MoE layer, as they are made

    def layer(
        self,
        index: int,
        count: int,
        width: int,
        fmt: str,
        activation: Activation = SILU,
        kind: type[HybridExperts] = HybridExperts,
        cpu_slots: int = 0,
    ) -> HybridExperts:
        """cpu_slots: in CPU memory; 0: as many as experts are there, and a spare place if they may move."""
        slot_of = self._placement.slots(index)
        first, shared = slots_in_use(slot_of), count - len(slot_of)
        slot_of = torch.cat((slot_of, torch.arange(first, first + shared, dtype=torch.int32)))
        gpu_count, cpu_count = (count_on(location, slot_of) for location in (Location.GPU, Location.CPU))
        tables = self._tables_of(index, count)
        shape = self._hidden, width, fmt, activation
        gpu = self._ops.gpu_experts(slot_of, *shape, tables=tables) if gpu_count else None
        cpu_slots = cpu_slots or cpu_count + int(self._live and first > 0)
        cpu = self._ops.cpu.experts(count, *shape, cpu_slots=cpu_slots) if cpu_count else None
        # No closure over self, which holds the layers: their memory is to be free as soon as nobody has them.
        whole = partial(self._ops.cpu.experts, count, *shape)
        self.layers[index] = kind(slot_of, gpu, cpu, self._handoff, whole, self._own_memory, shared)
        return self.layers[index]

    def _tables_of(self, index: int, count: int) -> SlotTable | None:
        if not self._live or index >= self._placement.layers:  # draft layers' stay where they are
            return None
        if self.tables is None:
            self.tables = SlotTables(self._placement.layers, count, self._ops.device)
        return self.tables.layer(index, count)
