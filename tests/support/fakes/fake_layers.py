"""MoE layers whose experts are partly on a fake GPU, and exchanges of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

import kernel_cases as cases
from fake_copies import FakeCopies, FakeSlots, FakeTables, at_once
from tandem.experts.live.exchange import LiveExchange, LiveLayer
from tandem.experts.live.virtual import Exchange
from tandem.kernels.cpu import WorkerPool, Workspace
from tandem.kernels.packed.experts import PackedExperts

EXPERTS, HIDDEN, WIDTH, ON_GPU = 7, 112, 96, 3  # four pairs of panels of gate and up or down, or three
PLENTY = 1 << 40
PATIENCE = 60.0  # for work after a step that is never cut short here


@cache
def static(seed: int) -> PackedExperts:
    """All experts of a layer in CPU memory, where they never move."""
    g = torch.Generator().manual_seed(seed)
    layer = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, "int4")
    for expert in range(EXPERTS):
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        layer.load(expert, *(torch.randn(shape, generator=g) for shape in shapes))
    return layer


class Layer:
    """One MoE layer, its first experts on the fake GPU."""

    def __init__(self, seed: int, on_gpu: int = ON_GPU, nodes: tuple[int, ...] = ()) -> None:
        self.static = static(seed)
        self.bytes = [self.static.packed(expert) for expert in range(EXPERTS)]
        places = min(EXPERTS, EXPERTS - on_gpu + 1)
        where = (
            Workspace(WorkerPool([-1, -1], 20, list(nodes)), "scalar")
            if nodes
            else cases.workspace_of("scalar")
        )
        self.cpu = PackedExperts(where, EXPERTS, HIDDEN, WIDTH, "int4", cpu_slots=places)
        for expert in range(on_gpu, EXPERTS):
            self.cpu.load_packed(expert, self.bytes[expert])
        slot_of = torch.tensor([e if e < on_gpu else -1 for e in range(EXPERTS)])
        self.gpu = FakeSlots(slot_of, self.cpu, self.bytes)

    def check(self, under_way: bool = False, in_file: Sequence[int] = ()) -> None:
        """Each expert in one place, unchanged; together they compute what the static layer does, to the bit. under_way:
        one may be in CPU memory as well. in_file: who is in no memory."""
        here, filed = self.gpu.table >= 0, torch.zeros(EXPERTS, dtype=torch.bool)
        filed[list(in_file)] = True
        slots = self.gpu.table[here].tolist()
        assert len(set(slots)) == len(slots) and not (here & filed).any()
        assert 0 <= self.cpu.loaded - (EXPERTS - len(slots) - len(in_file)) <= under_way
        for expert in range(EXPERTS):
            if not filed[expert]:
                slot = int(self.gpu.table[expert])
                found = self.gpu.memory[slot] if slot >= 0 else self.cpu.packed(expert)
                assert torch.equal(found, self.bytes[expert]), expert
        self._check_output(here | filed)

    def _check_output(self, elsewhere: Tensor) -> None:
        x = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16()
        ids, weights = torch.arange(EXPERTS, dtype=torch.int32)[:, None], torch.ones(EXPERTS, 1)
        expected = self.static.forward(x, ids, weights)
        left = torch.where(elsewhere[:, None], -1, ids)  # what the hand-off gives the CPU
        assert torch.equal(self.cpu.forward(x, left, weights), expected.where(~elsewhere[:, None], 0.0))

    def exchange(self, layer: int, which: int, other: int, coming: int | None = None) -> Exchange:
        """coming: an expert; else the other-th of those in CPU memory, where none is in its file."""
        there = (self.gpu.table >= 0).nonzero().flatten().tolist()
        elsewhere = (self.gpu.table < 0).nonzero().flatten().tolist()
        leaving = there[which % len(there)]
        coming = elsewhere[other % len(elsewhere)] if coming is None else coming
        return Exchange(layer, int(self.gpu.table[leaving]), leaving, coming)


def made(
    layers: list[Layer],
    copies: FakeCopies,
    budget: int = PLENTY,
    buffers: int = 2,
    tables: FakeTables | None = None,
) -> LiveExchange:
    copies.tables = tables or FakeTables([layer.gpu for layer in layers])
    sides = [LiveLayer(layer.gpu, layer.cpu) for layer in layers]
    return LiveExchange(sides, copies.tables, copies, budget, buffers, at_once, tail_seconds=PATIENCE)
