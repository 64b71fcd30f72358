"""Places in CPU memory for experts that move: planned within what may be used, and as many as loading makes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plans import MODEL, plan, reason, with_gpu
from tandem.experts.placement import ExpertPlacement, place
from tandem.planner.expert_sizes import ExpertSizes
from tandem.planner.forecast.ledger import RAM, Ledger
from tandem.planner.memory import DEFAULT_FRACTION
from tandem.planner.plan import Plan

LAYERS, EXPERTS, EACH = len(MODEL.moe_layers), MODEL.moe.experts.count, MODEL.expert_bytes("bf16")
FIXED = {"mem_fraction_static": DEFAULT_FRACTION, "chunked_prefill_size": 256}  # so that nothing is given up for room
ON = {"kt_enable_dynamic_expert_update": True}
EXACT = "uniform", "front-loading"


def planned(strategy: str, gpu_experts: int, free: int, **flags: object) -> Plan:
    flags = {**FIXED, "kt_gpu_experts_ratio": gpu_experts / (LAYERS * EXPERTS), **flags}
    p = plan(replace(with_gpu(), available_memory=free), kt_expert_placement_strategy=strategy, **flags)
    assert p.gpu is not None and p.gpu.sizes.experts == gpu_experts
    return p


def ram(p: Plan) -> Ledger:
    (found,) = (each for each in p.ledgers if each.place == RAM)
    return found


def spare_bytes(p: Plan) -> int:
    return next((entry.nbytes for entry in ram(p).entries if entry.name == "spare"), 0)


def mixed_layers(placement: ExpertPlacement) -> int:
    """Layers with experts on both sides."""
    return sum(0 < count < placement.gpu_experts.shape[1] for count in placement.gpu_experts.sum(1).tolist())


@pytest.mark.parametrize("strategy", [*EXACT, "random"])
def test_what_nobody_asked_for_stays_within_what_may_be_used(strategy: str) -> None:
    """With what steps take, and whatever else is beyond it. Machines from those that hold the experts just so to
    those with room for all."""
    for gpu_experts in (20, 320, 500, 940):
        room, decided = (LAYERS * EXPERTS - gpu_experts) * EACH, []
        for more in range(8 << 20, 264 << 20, 12 << 20):
            p = planned(strategy, gpu_experts, int((room + more) / DEFAULT_FRACTION))
            decided.append(p.gpu is not None and p.gpu.live)
            within = ram(p).total_bytes <= ram(p).budget_bytes
            assert within if decided[-1] else "no room for a spare place" in reason(p, "live placement")
            assert decided[-1] or spare_bytes(p) == 0
        assert decided == sorted(decided) and decided[-1] and not decided[0]


@pytest.mark.parametrize("gpu_experts", [20, 32, 320, 500, 940])
@pytest.mark.parametrize("strategy", [*EXACT, "random"])
def test_places_are_as_many_as_layers_have_experts_on_both_sides(strategy: str, gpu_experts: int) -> None:
    p = planned(strategy, gpu_experts, 4 << 30, **ON)
    layers = mixed_layers(place(strategy, LAYERS, EXPERTS, gpu_experts))
    assert p.gpu is not None and p.gpu.live and spare_bytes(p) >= layers * EACH
    assert strategy not in EXACT or spare_bytes(p) == layers * EACH


def test_places_of_layers_that_differ() -> None:
    """At most: which ones are mixed is known only where whole layers are filled."""
    each = (5, 7, 3)
    assert [ExpertSizes(each, 4).spare_bytes(n) for n in (0, 1, 2, 6, 11, 12)] == [0, 7, 12, 15, 7, 0]
    assert [ExpertSizes(each, 4, True).spare_bytes(n) for n in (0, 1, 4, 6, 11, 12)] == [0, 5, 0, 7, 3, 0]


@pytest.mark.parametrize("shared", [0, 1])
def test_loading_makes_these_places(shared: int) -> None:
    """Shared experts on the GPU are no slots to move into."""
    pytest.importorskip("triton")
    from tandem.experts.hybrid_store import HybridStore

    slots: list[int] = []

    def experts(*shape: Any, cpu_slots: int) -> None:
        slots.append(cpu_slots)

    ops = SimpleNamespace(
        device=torch.device("cpu"), gpu_experts=lambda *args, **more: None, cpu=SimpleNamespace(experts=experts)
    )
    for strategy in EXACT:
        for gpu_experts in (20, 32, 320, 940):
            slots.clear()
            placement = place(strategy, LAYERS, EXPERTS, gpu_experts)
            store: Any = HybridStore(ops, placement, None, 64, live=True)  # type: ignore[arg-type]
            for layer in range(LAYERS):
                store.layer(layer, EXPERTS + shared, 32, "bf16", kind=lambda *args: None)
            spare, sizes = sum(slots) - (LAYERS * EXPERTS - gpu_experts), ExpertSizes((1,) * LAYERS, EXPERTS)
            sizes = replace(sizes, layer_by_layer=strategy == "front-loading")
            assert spare == mixed_layers(placement) == sizes.spare_bytes(gpu_experts)
