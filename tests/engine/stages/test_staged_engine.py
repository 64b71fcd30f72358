"""An engine whose model is in stages answers as one on the CPU: prompts in chunks, graphs, prefixes, preemption."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fake_model import FakeTokenizer, check_pages, fake_plan, request, run, token_ids
from staged_sessions import CPU, borders, without_gpu
from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.engine.engine import Engine
from tandem.engine.stages.hooks import StagedStart
from tandem.engine.stages.runner import StagedRunner
from tandem.engine.start.parts import EngineParts
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.stage_handoffs import StageHandoffs
from tandem.kernels.cpu_ops import CpuOps
from tandem.models import build
from tandem.models.staged import Stage, StagedBuilder, StagedModel
from tandem.planner.gpu_plan import GpuPlan, StagePlan
from tandem.planner.plan import Plan

TIER = _core.supported_tiers()[-1]
PROMPTS = {"a": list(range(5, 40)), "b": [7, 8, 9], "c": [*range(5, 40), 50, 51], "d": [100] * 21}


def made_plan(config, gpu: GpuPlan | None, **changes: int) -> Plan:
    slots = 24 if config.state_layout("float32").slot_bytes else 0
    return replace(fake_plan(gpu=gpu, num_slots=slots, page_size=8), **changes)


def whole(path, pool) -> Engine:
    config = load_config(path)
    plan = made_plan(config, None)
    model = build(config, plan, open_checkpoint(path), CpuOps(pool, TIER))
    return Engine.from_parts(EngineParts(plan, config, model, FakeTokenizer()))


def staged(path, pool, sizes: tuple[int, ...] = (1, 2, 4), **changes: int) -> Engine:
    config = load_config(path)
    plans = tuple(StagePlan("GPU", "", *ends) for ends in pairwise(borders(len(config.layers), 2)))
    gpu = GpuPlan("GPU", 0, "uniform", None, sizes, 1.0, stages=plans)
    plan = made_plan(config, gpu, **changes)
    stages = tuple(Stage(each.first, each.end, CpuOps(pool, TIER), CPU) for each in plans)
    model = StagedModel(StagedBuilder(stages, config, plan, open_checkpoint(path), stages[0].ops))
    handoffs = StageHandoffs(HandoffSizes(8, 64, config.expert_channels, 2), [CPU, CPU], 1.0)
    parts = EngineParts(
        plan, config, model, FakeTokenizer(), handoff=handoffs, begin_step=StagedStart(stages), stages=stages
    )
    return Engine.from_parts(parts)


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_next"])
def test_answers_are_those_of_the_whole_model(monkeypatch, tiny_models, variant: str) -> None:
    """Twice, so that prefixes are found again; of delta nets from copied slots."""
    path, pool, calls = tiny_models[variant], _core.WorkerPool([-1, -1]), list[str]()
    asks = [request(name, prompt, max_tokens=12, ignore_eos=True) for name, prompt in PROMPTS.items()]
    expected = {name: token_ids(outputs) for (name, _), outputs in run(whole(path, pool), *asks).items()}
    without_gpu(monkeypatch, calls)
    engine = staged(path, pool, (1, 2, 3, 4))  # a CPU's delta nets do not know rows that fill a graph up
    assert isinstance(engine.gpu_runner, StagedRunner)
    for _ in range(2):
        got = {name: token_ids(outputs) for (name, _), outputs in run(engine, *asks).items()}
        assert got == expected
        check_pages(engine)
    assert engine.stats().cached_tokens > 0 and calls.count("stage 0") == calls.count("stage 1") > 0


def test_a_preempted_sequence_begins_again_in_all_stages(monkeypatch, tiny_models) -> None:
    path, pool = tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1])
    asks = [request(name, prompt, max_tokens=20, ignore_eos=True) for name, prompt in PROMPTS.items()]
    expected = {name: token_ids(outputs) for (name, _), outputs in run(whole(path, pool), *asks).items()}
    without_gpu(monkeypatch, [])
    engine = staged(path, pool, num_pages=14)
    got = {name: token_ids(outputs) for (name, _), outputs in run(engine, *asks).items()}
    assert got == expected and engine.stats().preemptions > 0


def test_a_failing_stage_costs_its_step_alone(monkeypatch, tiny_models) -> None:
    path, pool = tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1])
    without_gpu(monkeypatch, [])
    engine = staged(path, pool)
    layer = StagedModel.layer

    def failing(self, p, index, states) -> None:
        if index == len(self.layers) - 1:
            raise RuntimeError("CUDA out of memory")
        layer(self, p, index, states)

    with monkeypatch.context() as broken:
        broken.setattr(StagedModel, "layer", failing)
        outputs = run(engine, request("a", PROMPTS["a"]))
    assert outputs[("a", 0)][-1].finish_reason == "error"
    again = run(engine, request("b", PROMPTS["b"], max_tokens=4, ignore_eos=True))
    assert len(token_ids(again[("b", 0)])) == 4
    check_pages(engine)


def test_states_of_both_stages_have_the_model_s_order(monkeypatch, tiny_models) -> None:
    without_gpu(monkeypatch, [])
    engine = staged(tiny_models["qwen3_next"], _core.WorkerPool([-1, -1]))
    layout = engine.model_config.state_layout("float32", 8)
    shapes = [[tuple(array.shape[1:]) for array in arrays] for arrays in engine.gpu_runner._states]
    assert len(shapes) == len(layout.states) and all(shapes)
    assert all(isinstance(array, torch.Tensor) for arrays in engine.gpu_runner._states for array in arrays)
