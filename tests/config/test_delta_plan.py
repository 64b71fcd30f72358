"""Plans for gated delta nets on a GPU: their states are there, and so are their prompts' scratch and their experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, reason, with_gpu
from tandem.bench.architectures import named_config
from tandem.bench.step_bound import gpu_step_bytes
from tandem.bench.stored import expert_bytes, stored_as
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.mechanisms.cost import cost_of
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.planner.forecast.ledger import VRAM
from tandem.planner.gpu_plan import GPU_WORKSPACE_BYTES, workspace_bytes
from tandem.planner.memory import MemoryRequest
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.layers import Block, Layer
from tandem.spec.model_config import ModelConfig

MODEL = named_config("qwen3-next-80b", 8)  # six delta nets, two attentions
SLOT = 6 * (4 * (8192 + 2 * 32) * 2 + 32 * 128 * 128 * 4)  # last inputs and gates, memory


def planned(model: ModelConfig = MODEL, free: int = 64 * GIB, **flags: object) -> Plan:
    return resolve(EngineConfig.from_keywords("m", **flags), model, with_gpu(free))


def test_it_runs_on_the_gpu_with_its_experts() -> None:
    plan = planned()
    assert plan.gpu is not None and plan.gpu.sizes.experts == 8 * 512 and plan.gpu.attention == "triton"
    assert MODEL.state_layout("bfloat16").slot_bytes == SLOT


def test_states_are_in_the_gpus_ledger() -> None:
    """Three draft tokens need six more places for inputs: those of a step before are done again beside new ones."""
    draft_tokens = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
    for flags, slot in (({}, SLOT), (draft_tokens, SLOT + 6 * 6 * (8192 + 2 * 32) * 2)):
        plan = planned(max_running_requests=4, **flags)
        (ledger,) = [ledger for ledger in plan.ledgers if ledger.place == VRAM]
        entry = next(entry for entry in ledger.entries if entry.name == "states")
        assert plan.num_slots == 1 + 3 * 4 and entry.nbytes == plan.num_slots * slot


def test_scratch_of_long_chunks_is_counted() -> None:
    """Layers take turns: what most of them need, or the few that attend."""
    shape = next(mixer for mixer in MODEL.mixers if isinstance(mixer, DeltaRule))
    assert shape.chunk_row_bytes == 2 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32 * 64) + 2 * 4 * 32
    for chunk, rows in ((None, 2048), (16384, 16384)):
        config = EngineConfig.from_keywords("m", disable_cuda_graph=True, chunked_prefill_size=chunk)
        request = MemoryRequest(config, MODEL, with_gpu(), "bfloat16", "int4", 8)
        tables = 4 * 64 * MODEL.max_positions  # of 64 channels that turn
        step = StepSize(rows, 32768, 8)
        net, attention = (cost_of(mixer).scratch_bytes(step, MODEL.hidden, 0) for mixer in (shape, MODEL.mixers[3]))
        assert net == rows * shape.chunk_row_bytes
        assert workspace_bytes(request) == GPU_WORKSPACE_BYTES + 25 * SLOT + max(net, attention) + tables


def test_a_head_that_does_not_fit_stays_on_the_cpu_and_says_so() -> None:
    wide = [
        replace(block, body=replace(block.body, k_dim=256, v_dim=256)) if isinstance(block.body, DeltaRule) else block
        for block in MODEL.layers[0].blocks
    ]
    assert all(isinstance(block, Block) for block in wide)
    model = replace(MODEL, layers=(Layer(tuple(wide)), *MODEL.layers[1:]))
    assert "128 x 256 channels on a GPU, not 256 x 256" in reason(planned(model, kt_method="INT4"), "device")
    with pytest.raises(ConfigError, match="not 256 x 256"):
        planned(model, device="cuda")


def test_a_step_reads_and_writes_each_sequences_state() -> None:
    stored = stored_as(MODEL, "bf16")
    one, nine = (gpu_step_bytes(MODEL, stored, batch, 0) for batch in (1, 9))
    assert nine - one == 8 * 2 * SLOT


def test_fp8_experts_are_half_of_bf16s() -> None:
    assert expert_bytes(MODEL, "FP8") == pytest.approx(expert_bytes(MODEL, "BF16") / 2, rel=0.04)
