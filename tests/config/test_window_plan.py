"""Plans for layers that see a window: they have as many pages as windows need, and the others have more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, machine, reason, with_gpu
from tandem.bench.architectures import named_config
from tandem.engine.state.arrays import allocate
from tandem.flags.engine_config import EngineConfig
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.planner.memory import MemoryRequest
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve

MODEL = replace(
    named_config("qwen3-30b-a3b", 8),
    layers=tuple(
        replace(layer, blocks=(replace(layer.blocks[0], body=replace(layer.mixer, window=128)), *layer.blocks[1:]))
        if isinstance(layer.mixer, Gqa) and i % 2
        else layer
        for i, layer in enumerate(named_config("qwen3-30b-a3b", 8).layers)
    ),
)
TOKEN = 4 * 2 * 4 * 128 * 2  # of four layers, keys and values, in bfloat16


def planned(on_gpu: bool, **flags: object) -> Plan:
    where = with_gpu(40 * GIB) if on_gpu else machine(free=64 * GIB)
    return resolve(EngineConfig.from_keywords("m", kt_method="INT4", **flags), MODEL, where)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_windows_have_pages_of_their_own(on_gpu: bool) -> None:
    plan = planned(on_gpu, max_running_requests=4, chunked_prefill_size=512, max_total_tokens=32768)
    layout = MODEL.state_layout(plan.dtype, plan.page_size, plan.draft_tokens)
    assert (plan.num_pages, plan.num_window_pages) == (2048, layout.window_pages(4, 512))
    assert 4 * 128 // 16 < plan.num_window_pages < 200
    assert layout.token_bytes == 2 * TOKEN and layout.window_token_bytes == TOKEN
    made = allocate(layout, plan.num_pages, window_pages=plan.num_window_pages)
    kept = sum(array.nbytes for arrays in made.arrays for array in arrays)
    entry = next(entry for ledger in plan.ledgers for entry in ledger.entries if entry.name == "KV cache")
    assert (plan.gpu is not None) == on_gpu
    assert entry.nbytes == kept == 16 * TOKEN * (plan.num_pages + plan.num_window_pages)
    assert reason(plan, "windows") == "layers that see 128 tokens keep no others"


def test_what_windows_spare_holds_other_tokens() -> None:
    config = EngineConfig.from_keywords("m")
    request = MemoryRequest(config, MODEL, machine(), "bfloat16", "int4", 4, step_tokens=512)
    whole = replace(request, config=config.without(()), max_running_requests=10_000)
    for nbytes in (0, 1, TOKEN, 40 << 20, 1 << 30, 5 << 30):
        tokens = request.kv_tokens(nbytes)
        assert request.kv_bytes(tokens) <= nbytes < request.kv_bytes(tokens + 1)
        assert whole.kv_tokens(nbytes) == nbytes // (2 * TOKEN)  # as many windows as that keep everything
    assert request.kv_tokens(1 << 30) > 1.9 * whole.kv_tokens(1 << 30)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_windows_hold_a_step_of_any_length(on_gpu: bool) -> None:
    """Also where experts are streamed, whose steps are longer."""
    plan = planned(on_gpu, max_running_requests=2, max_total_tokens=65536, kt_num_gpu_experts=1 if on_gpu else None)
    layout = MODEL.state_layout(plan.dtype, plan.page_size, plan.draft_tokens)
    assert layout.window_pages(2, plan.max_step_tokens) <= plan.num_window_pages < plan.num_pages
    assert (plan.max_step_tokens == 8192) == on_gpu


def test_short_caches_and_other_readers_keep_all_tokens() -> None:
    """A cache that is no longer than its windows; kernels that know one table."""
    assert planned(False, max_total_tokens=4096).num_window_pages == 0
    assert planned(True, max_total_tokens=4096).num_window_pages == 0
    for backend, some in (("triton", True), ("torch", False), ("flashinfer", False)):
        config = EngineConfig.from_keywords("m", attention_backend=backend)
        request = MemoryRequest(config, MODEL, with_gpu(), "bfloat16", "int4", 4, step_tokens=2048)
        assert (request.window_pages > 0) == some
