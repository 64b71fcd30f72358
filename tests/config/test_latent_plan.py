"""Plans for latent attention on a GPU: what it takes there, and who computes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, with_gpu
from tandem.bench.architectures import CONFIGS, named_config
from tandem.bench.step_bound import gpu_step_bytes
from tandem.bench.stored import stored_as
from tandem.flags.engine_config import EngineConfig
from tandem.mechanisms.latent.cost import PARTIAL_BYTES, latent_scratch_bytes
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.token_index.cost import SCORE_BYTES
from tandem.planner.gpu_plan import GPU_WORKSPACE_BYTES, workspace_bytes
from tandem.planner.memory import MemoryRequest
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.spec.gpu_scratch import SQUARE
from tandem.spec.model_config import ModelConfig, rope_bytes

LITE = "deepseek-v2-lite"


def model(name: str = LITE, layers: int | None = 4) -> ModelConfig:
    return named_config(name, layers)


def planned(**flags: object) -> Plan:
    return resolve(EngineConfig.from_keywords("m", **flags), model(), with_gpu(64 * GIB))


def latent(name: str) -> Latent:
    found = model(name).mixers[0]
    assert isinstance(found, Latent)
    return found


def test_it_runs_on_the_gpu_in_our_kernels() -> None:
    plan = planned()
    assert plan.gpu is not None and plan.gpu.attention == "triton" and plan.gpu.sizes.experts == 3 * 64
    for backend in ("torch", "flashinfer"):  # as in the tutorial of DeepSeek-V3
        plan = planned(attention_backend=backend)
        assert plan.gpu is not None and plan.gpu.attention == "triton"
        assert any("--attention-backend changes nothing" in each.reason for each in plan.decisions)


def test_a_token_takes_one_latent_and_one_key_in_each_layer() -> None:
    assert model().state_layout("bfloat16").token_bytes == 4 * 2 * (512 + 64)
    tokens = planned(max_total_tokens=4096, context_length=4096)
    assert tokens.num_pages * tokens.page_size == 4096


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", LITE])
def test_scratch_is_bounded_and_in_the_ledger(name: str) -> None:
    shape = latent(name)
    short, long, chunk = (
        latent_scratch_bytes(shape, *sizes) for sizes in ((4096, 512), (1 << 20, 512), (1 << 20, 8192))
    )
    assert 2 * PARTIAL_BYTES < short <= long <= chunk < 2 * GIB
    assert latent_scratch_bytes(shape, 1 << 20, 100 * SQUARE) == chunk
    config = EngineConfig.from_keywords("m", disable_cuda_graph=True)
    request = MemoryRequest(config, model(name), with_gpu(), "bfloat16", "int4", 8)
    most = latent_scratch_bytes(shape, request.model.max_positions, 2048)
    tables = rope_bytes(request.model, request.model.max_positions)
    assert workspace_bytes(request) == GPU_WORKSPACE_BYTES + most + tables


@pytest.mark.parametrize("name", ["deepseek-v32", "glm-5"])
def test_indexers_take_scores_turned_queries_and_choices_beside(name: str) -> None:
    shape = latent(name)
    assert shape.index is not None
    plain, row = replace(shape, index=None), 2 * shape.index.heads * 128 + 4 * 2048
    for context, rows in ((4096, 512), (1 << 20, 8192)):
        more = latent_scratch_bytes(shape, context, rows) - latent_scratch_bytes(plain, context, rows)
        assert more == 3 * SCORE_BYTES + rows * row < GIB


def test_glm_5_runs_beside_a_gpu_and_keeps_keys_of_its_indexers() -> None:
    plan = resolve(EngineConfig.from_keywords("m"), model("glm-5", 6), with_gpu(80 * GIB))
    assert plan.gpu is not None and plan.gpu.attention == "triton"
    assert model("glm-5", 6).state_layout("bfloat16").token_bytes == 6 * 2 * (512 + 64 + 128)


@pytest.mark.parametrize("name", [name for name, keys in CONFIGS.items() if "kv_lora_rank" in keys])
def test_layers_are_counted_as_the_model_orders_them(name: str) -> None:
    dense = CONFIGS[name]["first_k_dense_replace"]
    config = named_config(name, 8)
    assert isinstance(dense, int) and config.moe_layers == tuple(range(dense, 8))


def test_matrices_of_heads_are_numbers_in_a_quantised_checkpoint() -> None:
    """Within 3 %: the router and the head, which are bfloat16, are in the other weights' mean."""
    config, shape = model("deepseek-v3", 8), latent("deepseek-v3")
    heads = 8 * shape.head_params
    plain, kept = config.dense_params, config.vocab * config.hidden + 5 * 256 * config.hidden + heads
    bytes_of_fp8 = 1 + 4 / 128**2
    wanted = (plain - kept) * bytes_of_fp8 + 2 * kept + 3 * 32768 * 8 * 2 * 576
    assert gpu_step_bytes(config, stored_as(config, "fp8"), 3, 32768) == pytest.approx(wanted, rel=0.03)
