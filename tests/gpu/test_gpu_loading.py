"""How experts get to a GPU's slots (on a GPU, or interpreted): from the checkpoint, some at a time, and out of a packed
cache. The bytes are those that the CPU packs, so they are compared exactly."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernel_cases as cases
from gpu import AVAILABLE, DEVICE, fed, needs_triton
from tandem import _core
from tandem.errors import KernelError
from tandem.experts.placement import place
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.packed.cache import PackedCache
from tandem.kernels.packed.experts import PackedExperts

if AVAILABLE:
    from tandem.experts.handoff import Handoff
    from tandem.experts.handoff_counts import HandoffSizes
    from tandem.experts.hybrid_experts import HybridExperts
    from tandem.experts.hybrid_store import HybridStore
    from tandem.kernels.gpu import uploads
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
EXPERTS, HIDDEN, WIDTH = 9, 64, 48
NODES = [(), (0, 1)]


def matrices(expert: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(expert)
    gate, up = torch.randn(2, WIDTH, HIDDEN, generator=g)
    return gate, up, torch.randn(HIDDEN, WIDTH, generator=g)


def cpu_ops(nodes: tuple[int, ...]) -> CpuOps:
    workers = _core.WorkerPool([-1, -1], 20, list(nodes)) if nodes else _core.WorkerPool([-1, -1])
    return CpuOps(workers, _core.supported_tiers()[-1])


def store_of(cpu: CpuOps, on_gpu: int, live: bool, strategy: str = "random") -> HybridStore:
    handoff = Handoff(HandoffSizes(1, 1, HIDDEN, 1), DEVICE, 20.0)
    placement = place(strategy, 1, EXPERTS, on_gpu)
    return HybridStore(GpuOps(DEVICE, cpu), placement, handoff, HIDDEN, live)


def packed_alone(cpu: CpuOps, fmt: str) -> PackedExperts:
    whole = cpu.experts(EXPERTS, HIDDEN, WIDTH, fmt)
    whole.load_all(0, [matrices(expert) for expert in range(EXPERTS)])
    return whole


def check(layer: HybridExperts, on_gpu: int, whole: PackedExperts) -> None:
    """Every expert is where the placement says, with the bytes of `whole`."""
    places = layer.slot_of.tolist()
    assert sorted(slot for slot in places if slot >= 0) == list(range(on_gpu))
    for expert, slot in enumerate(places):
        there = layer._gpu.slot(slot).cpu() if slot >= 0 else layer._cpu.packed(expert)
        assert torch.equal(there, whole.packed(expert)), expert


@pytest.mark.parametrize("room", [1, 2, 100])
@pytest.mark.parametrize("nodes", NODES)
def test_experts_are_packed_to_where_they_live(monkeypatch, nodes: tuple[int, ...], room: int) -> None:
    cpu = cpu_ops(nodes)
    whole = packed_alone(cpu, "int4")
    monkeypatch.setattr(uploads, "BUFFER_BYTES", room * whole.bytes_per_expert)
    for on_gpu in (5, EXPERTS):
        layer = store_of(cpu, on_gpu, live=False).layer(0, EXPERTS, WIDTH, "int4")
        layer.load(fed(EXPERTS, matrices))
        check(layer, on_gpu, whole)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("live", [False, True])
def test_a_packed_cache_fills_every_placement(tmp_path: Path, live: bool, nodes: tuple[int, ...]) -> None:
    cpu = cpu_ops(nodes)
    whole, told = packed_alone(cpu, "bf16"), list[str]()

    def unreadable(_: int) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("an expert was read")

    for turn, on_gpu in enumerate((4, 2, EXPERTS, 4)):
        cache = PackedCache(
            tmp_path / "x", "key", "a test", cpu.workspace, cpu.pool, told.append, dense=False
        )
        assert cases.opened(cache) == bool(turn)
        layer = store_of(cpu, on_gpu, live).layer(0, EXPERTS, WIDTH, "bf16")
        layer.load(fed(EXPERTS, unreadable if turn else matrices), cache.layer("experts"))
        cache.finish(lambda *_: None)
        check(layer, on_gpu, whole)
    assert len(told) == 1 and "written to" in told[0]


def test_an_expert_without_a_slot_is_refused() -> None:
    experts = GpuOps(DEVICE, cpu_ops(())).gpu_experts(torch.tensor([0, -1]).int(), HIDDEN, WIDTH, "bf16")
    with pytest.raises(KernelError, match="expert 1 has no slot"):
        experts.load_each([0, 1], [matrices(0), matrices(1)])


@pytest.mark.parametrize("live", [False, True])
def test_memory_is_free_as_soon_as_nobody_has_the_layers(live: bool) -> None:
    """Not when Python looks for cycles: it does not know that a few objects hold gigabytes."""
    gc.collect()
    gc.disable()
    try:
        store = store_of(cpu_ops(()), 3, live)
        store.layer(0, EXPERTS, WIDTH, "bf16").load(fed(EXPERTS, matrices))
        sides = store.layers[0].sides
        assert sides is not None
        kept = [weakref.ref(store.layers[0]), weakref.ref(sides.cpu), weakref.ref(sides.gpu)]
        del store, sides
        assert [ref() for ref in kept] == [None, None, None]
    finally:
        gc.enable()
