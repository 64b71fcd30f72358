"""Where a draft layer's experts are planned beside a GPU, and what that takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plans import GIB, with_gpu
from tandem.bench.architectures import named_config, named_subject
from tandem.checkpoint.metadata.from_names import INDEX, IndexNames
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.models.draft_layer import with_stored_drafts
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve

MODEL = named_config("glm-4.5-air", 8)  # 7 MoE layers of 128 experts, and a draft layer's


def planned(flags: str, free: int) -> Plan:
    line = f"x --device cuda --kt-method INT4 --speculative-algorithm NEXTN --context-length 8192 {flags}"
    return resolve(EngineConfig.from_args(line.split()), MODEL, with_gpu(free * GIB))


def entry(plan: Plan, memory: str, name: str) -> int:
    """Bytes; 0 where there is no such entry."""
    return sum(e.nbytes for ledger in plan.ledgers if ledger.place == memory for e in ledger.entries if e.name == name)


def decided(plan: Plan, name: str) -> str:
    return next(d.value for d in plan.decisions if d.name == name)


def test_experts_of_the_draft_layer_are_on_the_gpu_where_they_fit() -> None:
    plan = planned("--kt-gpu-experts-ratio 1", 40)
    assert plan.gpu is not None and plan.gpu.sizes.draft_experts and decided(plan, "draft experts") == "GPU"
    each = MODEL.expert_bytes("int4")
    assert entry(plan, "VRAM", "draft experts") == 128 * each
    assert entry(plan, "RAM", "experts") == 0


def test_three_layers_that_draft_a_block_have_three_layers_experts() -> None:
    """On either side; and pages of their own have the rings of three layers, and what they read of the model."""
    model = named_config("deepseek-v4-flash-0731", 8)
    line = "x --device cuda --speculative-algorithm DSPARK --context-length 8192 --kt-method INT4"
    asked = EngineConfig.from_args([*line.split(), "--kt-num-gpu-experts", "0"])
    plans = [resolve(asked, model, replace(with_gpu(free * GIB), available_memory=200 * GIB)) for free in (60, 16)]
    assert [decided(plan, "draft experts") for plan in plans] == ["GPU", "CPU memory"]
    each = model.expert_bytes("int4")
    assert entry(plans[0], "VRAM", "draft experts") == 3 * 256 * each
    assert [entry(plan, "RAM", "experts") for plan in plans] == [8 * 256 * each, 11 * 256 * each]
    assert model.drafts is not None and model.drafts.block is not None
    draft_tokens, width = model.drafts.block.size, 2  # bytes of a number
    rings = sum((128 + draft_tokens) * channels * width for channels in (512, 512, 512, 3 * 4096))
    own = [replace(model, drafter=drafter).state_layout("bfloat16", 128, draft_tokens).slot_bytes
           for drafter in (None, model.drafts)]  # fmt: skip
    assert own[1] - own[0] == rings


def test_else_they_are_in_cpu_memory() -> None:
    """All that the GPU has beside the dense weights was asked for."""
    for free in range(40, 4, -1):
        try:
            plan = planned("--kt-gpu-experts-ratio 1", free)
        except ConfigError:
            pytest.fail("it has room for all experts, and never for a draft layer's in CPU memory alone")
        if not plan.gpu.sizes.draft_experts:
            break
    assert decided(plan, "draft experts") == "CPU memory" and plan.gpu.sizes.experts == 7 * 128
    assert entry(plan, "RAM", "experts") == 128 * MODEL.expert_bytes("int4")


def test_kernels_that_plan_their_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="flashinfer plans its steps.*NGRAM instead of NEXTN"):
        planned("--attention-backend flashinfer", 40)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4-flash"])
def test_tutorials_that_ask_for_flashinfer_are_met(name: str) -> None:
    """Their attention has kernels of its own, and so have the draft layer's passes."""
    line = "x --device cuda --attention-backend flashinfer --speculative-algorithm EAGLE --kt-num-gpu-experts 0"
    machine = replace(with_gpu(80 * GIB), available_memory=200 * GIB)
    plan = resolve(EngineConfig.from_args(line.split()), named_config(name, 6), machine)
    assert plan.gpu is not None and plan.gpu.attention == "triton" and decided(plan, "speculation")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("glm-4.5-air", ["model.layers.46.eh_proj.weight"]),
        ("glm-4.5-air", ["model.layers.46.eh_proj.weight_packed"]),
        ("glm-4.5-air", ["language_model.model.embed_tokens.weight", "language_model.model.layers.46.eh_proj.weight"]),
        ("deepseek-v4-flash", ["layers.0.attn.wkv.weight", "mtp.0.e_proj.weight"]),
        ("deepseek-v4-flash", ["layers.0.attn.wkv.weight", "layers.43.e_proj.weight", "layers.43.h_proj.weight"]),
    ],
)
def test_an_index_names_a_draft_layer_as_files_do(tmp_path: Path, name: str, names: list[str]) -> None:
    """Before a download, too, whatever it is called inside other models; scales alone are none."""
    model, _ = named_subject(name)
    assert model.drafts is not None
    assert with_stored_drafts(model, index_of(tmp_path, names), "NEXTN") == model
    scales = index_of(tmp_path, [f"{each.rpartition('.')[0]}.weight_scale" for each in names])
    assert with_stored_drafts(model, scales, None).drafts is None
    with pytest.raises(ConfigError, match=r"index\.json has no draft layer: there is no tensor .*_proj\.weight"):
        with_stored_drafts(model, scales, "NEXTN")


def index_of(folder: Path, names: list[str]) -> IndexNames:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    return IndexNames.of(folder)
