"""A tiny model whose layers are on one GPU twice, or on several, in the runner of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from gpu_sessions import PAGE, PAGES, ROWS, Session, plan
from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.stages.hooks import StagedStart
from tandem.engine.stages.runner import StagedRunner
from tandem.engine.stages.states import allocate_stages
from tandem.engine.step.batch import StepShape
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.models.batch import ForwardBatch
from tandem.models.staged import StagedBuilder, StagedModel
from tandem.planner.gpu_plan import StagePlan
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig


def uuid_of(device: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def pinned(batch: ForwardBatch) -> ForwardBatch:
    """The same in pinned memory, which GPUs read where it is."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: each.pin_memory() for name, each in tensors.items() if isinstance(each, Tensor)})


def stage_plans(layers: int, devices: Sequence[int]) -> tuple[StagePlan, ...]:
    """As many layers on each of these GPUs, which may be the same."""
    count = len(devices)
    ends = [layers * number // count for number in range(count + 1)]
    return tuple(
        StagePlan("GPU", uuid_of(device), first, end)
        for device, first, end in zip(devices, ends, ends[1:], strict=False)
    )


def staged(made: Plan, config: ModelConfig, devices: Sequence[int]) -> Plan:
    """The plan of one GPU, in stages."""
    assert made.gpu is not None
    gpu = replace(made.gpu, stages=stage_plans(len(config.layers), devices))
    return replace(made, gpu=gpu, num_slots=ROWS + 2)


class StagedGpu(Session):
    """As a `Session`, in stages on these GPUs."""

    def __init__(
        self, path: Path, share: float, graphs: tuple[int, ...], devices: Sequence[int] = (0, 0), fmt: str = "bf16"
    ) -> None:
        from tandem.engine.stages.sides import end_posts, staged_sides, staged_usage

        config = load_config(path)
        made = staged(replace(plan(share, graphs, config.routed_experts), expert_format=fmt), config, devices)
        self.pool = _core.WorkerPool([-1, -1])
        self.sides = staged_sides(made, config, CpuOps(self.pool, made.tier))
        self.usage = staged_usage(EngineConfig(model="demo"), made, config, self.sides)
        stages = self.sides.stages
        self.model = StagedModel(
            StagedBuilder(
                stages, config, made, open_checkpoint(path), stages[0].ops, None, self.sides.store, usage=self.usage
            )
        )
        end_posts(self.sides)
        states = allocate_stages(made, config, stages)
        self.runner = StagedRunner(
            self.model, states.arrays, self.sides.handoffs, GraphPlan(graphs, PAGES, one_stream=True),
            StepShape(PAGE, 256), usage=self.usage, begin_step=StagedStart(stages),
        )  # fmt: skip
