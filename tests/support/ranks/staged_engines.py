"""An engine whose model is in stages on the CPU, and one that has the whole model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from fake_model import FakeTokenizer, fake_plan
from plans import gpu_plan
from staged_sessions import CPU, borders
from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.engine.engine import Engine
from tandem.engine.stages.hooks import StagedStart
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


def staged(path, pool, sizes: tuple[int, ...] = (1, 2, 4), pipelined_chunks: int = 1, **changes: int) -> Engine:
    config = load_config(path)
    plans = tuple(StagePlan("GPU", "", *ends) for ends in pairwise(borders(len(config.layers), 2)))
    gpu = gpu_plan(graph_sizes=sizes, stages=plans, pipelined_chunks=pipelined_chunks)
    plan = made_plan(config, gpu, **changes)
    stages = tuple(Stage(each.first, each.end, CpuOps(pool, TIER), CPU) for each in plans)
    model = StagedModel(StagedBuilder(stages, config, plan, open_checkpoint(path), stages[0].ops))
    handoffs = StageHandoffs(HandoffSizes(8, 64, config.expert_channels, 2), [CPU, CPU], 1.0)
    parts = EngineParts(
        plan, config, model, FakeTokenizer(), handoff=handoffs, begin_step=StagedStart(stages), stages=stages
    )
    return Engine.from_parts(parts)
