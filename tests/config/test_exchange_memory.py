"""GPU memory of experts that change places: it is reserved and listed where they do, and nothing of it where not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fake_copies import FakeCopies, FakeTables
from fake_layers import Layer
from plans import GIB, MODEL, machine, plan, reason, with_gpu
from tandem.bench.architectures import named_config
from tandem.bench.memory_ledger import planned
from tandem.errors import ConfigError
from tandem.experts.live.exchange import LiveExchange
from tandem.machine.gpus import Gpu
from tandem.machine.machine import TIERS
from tandem.planner import sizing
from tandem.planner.forecast.ledger import VRAM
from tandem.planner.plan import Plan
from tandem.spec.gpu_scratch import EXCHANGE_BYTES, exchange_buffers

ON = {"kt_enable_dynamic_expert_update": True}
EXPERT_BYTES = MODEL.expert_bytes("bf16")
SMALL = 2 * GIB - 3 * GIB // 8  # not all experts fit
FIXED = {"mem_fraction_static": 0.9, "chunked_prefill_size": 256}  # so that nothing can be given up for room
NO_ROOM = "MiB of GPU memory for experts that change places are not there"
NOT_TO_SPARE = NO_ROOM.replace("there", "to spare")  # where nobody asked


def entries(p: Plan) -> dict[str, int]:
    (vram,) = (each for each in p.ledgers if each.place == VRAM)
    return {entry.name: entry.nbytes for entry in vram.entries}


def small(free: int = SMALL, **flags: object) -> Plan:
    return plan(with_gpu(free=free), context_length=512, max_running_requests=2, **flags)


class CountedCopies(FakeCopies):
    """Notes how large a buffer was asked for."""

    nbytes = 0

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        self.nbytes = nbytes
        return super().device_buffer(nbytes)


def test_exchanges_take_what_is_planned() -> None:
    layer, copies = Layer(1), CountedCopies()
    LiveExchange([None, layer], FakeTables([layer.gpu]), copies, 1)  # type: ignore[list-item]
    each = layer.gpu.bytes_per_expert
    assert copies.nbytes == exchange_buffers(each) * each


@pytest.mark.parametrize("expert_bytes", [1 << 10, 5 << 20, 40 << 20, 70 << 20])
def test_exchanges_have_two_buffers_however_large(expert_bytes: int) -> None:
    taken = exchange_buffers(expert_bytes) * expert_bytes
    assert 2 * expert_bytes <= taken <= max(EXCHANGE_BYTES, 2 * expert_bytes)


@pytest.mark.parametrize("asked", [True, False])
def test_buffers_of_exchanges_are_in_the_ledger(asked: bool) -> None:
    """By flag, or where it pays."""
    still = small(disable_dynamic_expert_update=True)
    p = small(**(ON if asked else {}))
    assert p.gpu is not None and still.gpu is not None and p.gpu.live and not still.gpu.live
    took = exchange_buffers(EXPERT_BYTES, still.gpu.sizes.experts) * EXPERT_BYTES
    assert entries(p)["exchanges"] == p.gpu.sizes.exchange_bytes == took > 0
    assert "exchanges" not in entries(still) and still.gpu.sizes.exchange_bytes == 0
    lost = still.gpu.sizes.experts - p.gpu.sizes.experts
    assert took - EXPERT_BYTES <= lost * EXPERT_BYTES <= took + EXPERT_BYTES
    assert p.ledgers[0].total_bytes <= p.ledgers[0].budget_bytes
    more = planned(p, MODEL).gpu - planned(replace(p, gpu=replace(p.gpu, sizes=still.gpu.sizes)), MODEL).gpu
    assert more == took - lost * EXPERT_BYTES


def test_buffers_take_the_place_of_few_experts() -> None:
    """On a GPU that has few of them. At least two are needed: from sixteen experts on they are an eighth."""
    for free in range(GIB, SMALL, 1 << 26):
        still, live = _experts(free, disable_dynamic_expert_update=True, **FIXED), _experts(free, **ON, **FIXED)
        assert live >= still - max(2, still // 8) - 1


@pytest.mark.parametrize(
    "flags", [{}, {"disable_dynamic_expert_update": True}, {**ON, "kt_gpu_experts_ratio": 1.0}, {"device": "cpu"}]
)
def test_where_nothing_moves_nothing_is_reserved(flags: dict[str, object]) -> None:
    p = plan(with_gpu(), **flags)
    assert p.gpu is None or (p.gpu.sizes.exchange_bytes == 0 and "exchanges" not in entries(p))


def test_moving_that_leaves_no_slot_does_not_happen() -> None:
    """Where the buffers take all that experts have, they stay and have it."""
    frees = range(GIB, SMALL, 1 << 20)
    few = next(free for free in frees if _experts(free, disable_dynamic_expert_update=True, **FIXED))
    p = small(few, **ON, **FIXED)
    assert p.gpu is not None and not p.gpu.live and p.gpu.sizes.experts >= 1
    assert NO_ROOM in reason(p, "live placement") and "exchanges" not in entries(p)


def _experts(free: int, **flags: object) -> int:
    try:
        p = small(free, **flags)
    except ConfigError:
        return 0
    return p.gpu.sizes.experts if p.gpu is not None else 0


def test_very_few_experts_stay_where_nobody_asked() -> None:
    """Below sixteen, two buffers would take the place of more than an eighth of them."""
    counts = set()
    for free in range(GIB, SMALL, 1 << 22):
        count = _experts(free, disable_dynamic_expert_update=True, **FIXED)
        p = small(free, **FIXED) if count else None
        if p is not None and p.gpu is not None:
            counts.add((count >= 16, p.gpu.live))
            assert p.gpu.live or (NOT_TO_SPARE in reason(p, "live placement") and p.gpu.sizes.experts == count)
            assert not p.gpu.live or p.gpu.sizes.experts >= count - max(2, count // 8) - 1
    assert (False, False) in counts and (True, True) in counts and (False, True) not in counts


def test_experts_make_room_for_buffers_and_the_kv_cache_does_not() -> None:
    """Where their number is open."""
    for free in range(2 * GIB, 2 * GIB + GIB // 2, 1 << 26):
        still, p = (_long(free, disable_dynamic_expert_update=off) for off in (True, False))
        assert still.gpu is not None and p.gpu is not None and p.gpu.live
        assert p.gpu.sizes.memory.kv_tokens == still.gpu.sizes.memory.kv_tokens
        lost = (still.gpu.sizes.experts - p.gpu.sizes.experts) * EXPERT_BYTES
        assert lost == p.gpu.sizes.exchange_bytes > 0


def test_beside_a_fixed_number_of_experts_the_kv_cache_gives_up_a_twentieth_at_most() -> None:
    took, found = exchange_buffers(EXPERT_BYTES, 576) * EXPERT_BYTES, set()
    for free in range(2 * GIB + GIB // 2, 4 * GIB, 1 << 24):
        still, p = (_long(free, kt_gpu_experts_ratio=0.6, disable_dynamic_expert_update=off) for off in (True, False))
        assert still.gpu is not None and p.gpu is not None
        memory = still.gpu.sizes.memory
        if memory.kv_tokens > 34700:  # below, a default context would be shorter
            each = entries(still)["KV cache"] / memory.kv_tokens
            found.add(p.gpu.live)
            assert p.gpu.live == (took < 0.05 * memory.kv_tokens * each)
            assert p.gpu.sizes.memory.kv_tokens >= 0.95 * memory.kv_tokens
    assert found == {True, False}


def _long(free: int, **flags: object) -> Plan:
    return plan(with_gpu(free=free), replace(MODEL, max_positions=1 << 20), **FIXED, **flags)


@pytest.mark.parametrize("lost", [{"ring_bytes": 0}, {"prompt_sizes": ()}, {"draft_experts": False}])
def test_what_nobody_asked_for_costs_nothing_that_is_all_or_none(lost: dict[str, object]) -> None:
    found = plan(with_gpu(), kt_gpu_experts_ratio=0.5).gpu
    assert found is not None and found.live
    still = replace(found.sizes, draft_experts=True)
    assert sizing._kept(still, still) and not sizing._kept(still, replace(still, **lost))


def test_what_nobody_asked_for_costs_no_context() -> None:
    share = {"kt_gpu_experts_ratio": 0.5, "context_length": 4096}
    for free in range(GIB, 3 * GIB, 1 << 26):
        try:
            still = plan(with_gpu(free=free), **share, disable_dynamic_expert_update=True)
        except ConfigError:
            continue
        p = plan(with_gpu(free=free), **share)
        assert p.gpu is not None and still.gpu is not None
        assert p.context_length >= still.context_length and p.gpu.sizes.ring_bytes >= still.gpu.sizes.ring_bytes
        assert p.gpu.live or NOT_TO_SPARE in reason(p, "live placement")
        assert p.gpu.live or entries(p) == entries(still)


@pytest.mark.parametrize(
    ("name", "ram", "free", "flags"),
    [
        ("qwen3-30b-a3b", 3.38338, 43.89736, {"kt_method": "INT8"}),
        ("qwen3.5-35b-a3b", 7.08, 21.94, {"max_total_tokens": 8192, "kt_gpu_prefill_token_threshold": 0}),
    ],
)
def test_what_nobody_asked_for_gives_up_nothing_more(name: str, ram: float, free: float, flags: dict[str, int]) -> None:
    """Plans for nearly as much speed are near to each other: with a little less memory another one would be taken."""
    gpu = Gpu("H100", int(1.1 * free * GIB), int(free * GIB), "gen5 x16")
    here = replace(machine(16, free=int(ram * GIB)), tiers=TIERS, gpus=(gpu,))
    model, flags = named_config(name, None), {"kt_method": "INT4"} | flags
    still, p = (plan(here, model, disable_dynamic_expert_update=off, **flags) for off in (True, False))
    assert p.gpu is not None and still.gpu is not None and p.gpu.live
    assert reason(p, "made to fit") == reason(still, "made to fit")
    assert (p.max_running_requests, p.max_step_tokens) == (still.max_running_requests, still.max_step_tokens)
    assert p.gpu.embedding_in_ram == still.gpu.embedding_in_ram and p.gpu.graph_sizes == still.gpu.graph_sizes
