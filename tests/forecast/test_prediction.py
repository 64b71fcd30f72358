"""Predicted speeds: they follow the bytes and products, hold what was measured, and say where they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plans import GIB, MODEL, machine
from tandem.bench.architectures import CONFIGS, named_config, named_subject
from tandem.bench.stored import STORED_METHODS, experts_of, stored_as
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.machine.machine import TIERS, Core, Machine
from tandem.planner.forecast.bound import bytes_per_step
from tandem.planner.forecast.prediction import CPU_ATTENTION_SHARE, WIDTH, Case, Prediction, Range, predict
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.resolve import resolve
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormats

# The machine that was measured, and its speeds on that day (benchmarks/results, commit 9481f19).
CORES = tuple(Core(cpu, 0, 0) for cpu in range(16))
MEASURED = Machine(
    "Xeon", CORES, TIERS, 128 * GIB, 120 * GIB,
    gpus=(Gpu("H200", 141 * GIB, 139 * GIB, "gen5 x16", capability=(9, 0)),),
)  # fmt: skip
SPEEDS = Speeds(dram_gbps=137, cpu_flops=17.4e12, gpu_gbps=4200, gpu_flops=6.5e14, pcie_gbps=55)
H100 = Speeds(dram_gbps=135, cpu_flops=17.4e12, gpu_gbps=2900, gpu_flops=6.3e14, pcie_gbps=55)  # that of prompts
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# (share of the experts on the GPU, sequences) → tokens per second of Qwen3-30B-A3B's shape in int4
DECODED = {
    (0.0, 1): 88, (0.5, 1): 157, (1.0, 1): 499, (0.0, 8): 131, (0.5, 8): 261, (1.0, 8): 1497, (1.0, 16): 1928,
}  # fmt: skip
PROMPTS = {  # (share, tokens); all layers, before whole warpgroups multiplied codes
    (0.0, 512): 2533, (0.0, 2048): 6884, (0.0, 8192): 25350, (0.5, 256): 2852, (0.5, 512): 4946, (0.5, 1024): 7882,
    (0.5, 2048): 13704, (0.5, 8192): 38822, (1.0, 512): 24487, (1.0, 2048): 34349, (1.0, 8192): 35245,
}  # fmt: skip


# Likewise of 24 layers, with them (30 November).
BY_WARPGROUPS = {
    (0.5, 512): 10020, (0.5, 2048): 25942, (0.5, 8192): 85335,
    (1.0, 512): 49235, (1.0, 2048): 94603, (1.0, 8192): 90128,
}  # fmt: skip


def case(share: float, model: ModelConfig = named_config("qwen3-30b-a3b", None), **flags: object) -> Case:
    flags = {"kt_method": "INT4", "kt_gpu_experts_ratio": share, "context_length": 9000} | flags
    config = EngineConfig.from_keywords("m", max_running_requests=32, **flags)
    return Case(model, StoredFormats(), resolve(config, model, MEASURED), SPEEDS)


def prompt(share: float, tokens: int) -> Range:
    old = replace(case(share, chunked_prefill_size=8192), speeds=H100)
    assert old.plan.gpu is not None and old.plan.gpu.has_wgmma
    plan = replace(old.plan, gpu=replace(old.plan.gpu, has_wgmma=False))
    return predict(replace(old, plan=plan), prompt=tokens).prompt


def new_prompt(share: float, tokens: int) -> Range:
    return predict(case(share, named_config("qwen3-30b-a3b", 24), chunked_prefill_size=8192), prompt=tokens).prompt


def test_prompts_by_warpgroups_lie_in_their_ranges() -> None:
    found = {where: new_prompt(*where) for where in BY_WARPGROUPS}
    outside = [where for where, rate in BY_WARPGROUPS.items() if not found[where].low <= rate <= found[where].high]
    assert not outside, found


@pytest.mark.parametrize("where", DECODED)
def test_what_was_measured_lies_in_the_predicted_range_of_decoding(where: tuple[float, int]) -> None:
    found = predict(case(where[0]), (where[1],)).decode[where[1]]
    assert found.low <= DECODED[where] <= found.high and found.high / found.low <= WIDTH + 1e-9


def test_nearly_all_prompts_lie_in_their_ranges() -> None:
    found = {where: prompt(*where) for where in PROMPTS}
    outside = [where for where, rate in PROMPTS.items() if not found[where].low <= rate <= found[where].high]
    assert len(outside) <= len(PROMPTS) // 10, outside


def kept_rows() -> list[dict[str, Any]]:
    """Of one sequence, by whole models or some of their layers, on machines with a GPU."""
    files = RESULTS.glob("nvidia-*-threads/decode.json")
    rows = [row for file in files for row in json.loads(file.read_text())]
    return [row for row in rows if row["batch"] == 1 and "by" not in row]


def kept_range(row: dict[str, Any]) -> Range:
    """As it would have been predicted from the memories' speeds of that run, and from where the experts that its steps
    used lay: made-up routers may choose those of one side more often."""
    model, fmt = named_config(row["config"], row["layers"]), row["format"].upper()
    stored = stored_as(model, row["dense"], experts_of(fmt))
    flags = {} if fmt in STORED_METHODS else {"kt_method": fmt}
    tokens = min(model.max_positions, row["context"] + 1024)
    used = row.get("hit", row["gpu_share"])
    config = EngineConfig.from_keywords("m", kt_gpu_experts_ratio=used, context_length=tokens, **flags)
    roomy = replace(MEASURED, total_memory=4096 * GIB, available_memory=4000 * GIB)
    speeds = replace(SPEEDS, dram_gbps=row["dram_gbps"], gpu_gbps=row["hbm_gbps"])
    made = Case(model, stored, resolve(config, model, roomy, stored), speeds)
    return predict(made, (1,), row["context"]).decode[1]


def test_nearly_all_kept_rows_of_decoding_lie_in_their_ranges() -> None:
    found = [(row, kept_range(row)) for row in kept_rows()]
    outside = [(row, made) for row, made in found if not made.low <= row["tok_s"] <= made.high]
    assert len(found) >= 10 and len({row["config"] for row, _ in found}) >= 5
    assert len(outside) <= len(found) // 10, outside


def on_cpu(gbps: float = 50.0, **flags: object) -> Prediction:
    plan = resolve(EngineConfig.from_keywords("demo", **flags), MODEL, machine())
    return predict(Case(MODEL, StoredFormats(), plan, Speeds(gbps, 1e12)))


def test_no_prediction_is_above_the_bound() -> None:
    for found in (on_cpu(), predict(case(0.5))):
        assert all(r.low < r.high <= r.bound for r in (*found.decode.values(), found.prompt))


def test_the_bound_of_decoding_is_the_bytes_over_the_bandwidth() -> None:
    found = on_cpu(50.0)
    states = found.context * MODEL.state_layout("bfloat16").token_bytes
    nbytes = bytes_per_step(MODEL, "bfloat16", "bf16", 1) + states
    assert found.decode[1].bound == pytest.approx(50e9 / nbytes)


def test_faster_memory_and_smaller_experts_decode_faster() -> None:
    slow, fast, small = on_cpu(50.0), on_cpu(100.0), on_cpu(50.0, kt_method="INT4")
    assert fast.decode[1].middle > 1.5 * slow.decode[1].middle
    assert small.decode[1].middle > slow.decode[1].middle
    assert slow.decode[8].middle > slow.decode[1].middle  # together; each slower
    assert slow.decode[8].middle / 8 < slow.decode[1].middle


@pytest.mark.parametrize("tier", TIERS)
def test_attention_has_the_speed_that_was_read_or_its_tiers_share(tier: str) -> None:
    """The peak of AMX is that of its tiles, which attention does not use."""

    def seconds(measured: float) -> float:
        speeds = Speeds(50.0, 1e12, cpu_attention_flops=measured)
        plan = resolve(EngineConfig(model="demo", kernel_tier=tier), MODEL, replace(machine(), tiers=TIERS))
        return predict(Case(MODEL, StoredFormats(), plan, speeds)).prompt.parts["attention"]

    assert seconds(0.0) == pytest.approx(seconds(CPU_ATTENTION_SHARE[tier] * 1e12))
    assert seconds(1e11) == pytest.approx(seconds(2e11) * 2)


def test_only_prompts_that_are_not_replayed_wait_for_a_slow_host() -> None:
    def rate(launch_seconds: float, **flags: object) -> float:
        slow = replace(SPEEDS, launch_seconds=launch_seconds)
        return predict(replace(case(1.0, **flags), speeds=slow), prompt=2048).prompt.middle

    assert rate(1e-4) == rate(1e-6) and rate(1e-4, disable_cuda_graph=True) < rate(1e-6, disable_cuda_graph=True) / 4


def test_a_longer_context_decodes_slower() -> None:
    short, long = (predict(case(0.5), context=tokens).decode[1].middle for tokens in (100, 8000))
    assert long < short


def test_context_and_prompt_are_what_the_plan_allows() -> None:
    plan = resolve(EngineConfig(model="demo", context_length=300, max_running_requests=4), MODEL, machine())
    found = predict(Case(MODEL, StoredFormats(), plan, Speeds()), (1, 8))
    assert (found.context, found.prompt_tokens, set(found.decode)) == (300, 300, {1})


@pytest.mark.parametrize("name", CONFIGS)
def test_every_named_model_is_predicted_where_it_fits(name: str) -> None:
    model, stored = named_subject(name)
    roomy = replace(MEASURED, total_memory=4096 * GIB, available_memory=4000 * GIB)
    plan = resolve(EngineConfig(model=name), model, roomy, stored)
    found = predict(Case(model, stored, plan, SPEEDS))
    assert all(0 < r.low < r.high <= r.bound for r in (*found.decode.values(), found.prompt))
    assert stored.experts.quantised == ("quantization_config" in CONFIGS[name])
