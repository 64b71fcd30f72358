"""`StagedSides`: what a model has whose layers are divided among GPUs. Imported only where some are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.engine.expert_statistics import expert_placement, expert_usage
from tandem.engine.stages.hooks import StagedStart
from tandem.engine.start.gpu_device import planned_device
from tandem.engine.start.gpu_side import attention_shape, handoff_sizes
from tandem.engine.start.parts import EngineParts
from tandem.experts.hybrid_experts import HybridExperts
from tandem.experts.hybrid_store import HybridStore
from tandem.experts.placement import ExpertPlacement
from tandem.experts.stage_handoffs import StageHandoffs
from tandem.experts.streaming.stream import ExpertStream
from tandem.experts.usage.staged_usage import StagedUsage
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.gpu.attention_backends import attention_of
from tandem.kernels.gpu.ops import GpuOps
from tandem.models.staged import Stage, stage_of
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig


class StagedStore:
    """Each layer's experts where its stage is. Layers are numbered as in a store of all of them."""

    def __init__(self, stores: Sequence[HybridStore], stages: Sequence[int]) -> None:
        """stages: of each layer with experts, its number."""
        self.stores, self.stages = stores, stages

    def layer(self, index: int, *arguments: Any) -> HybridExperts:
        """As `HybridStore.layer`."""
        return self.stores[self.stages[index]].layer(index, *arguments)

    @property
    def layers(self) -> list[HybridExperts]:
        """In the model's order, once it was built."""
        return [store.layers[index] for store in self.stores for index in sorted(store.layers)]


@dataclass(frozen=True, slots=True)
class StagedSides:
    """The operations of every stage, where experts live, and the way between GPUs and CPU."""

    stages: tuple[Stage, ...]
    store: StagedStore
    handoffs: StageHandoffs
    placement: ExpertPlacement


def staged_sides(plan: Plan, model: ModelConfig, cpu: CpuOps) -> StagedSides:
    """Raises ConfigError when PyTorch cannot use one of the GPUs."""
    assert plan.gpu is not None
    gpu = plan.gpu
    stages = tuple(_stage(plan, model, cpu, each.first, each.end, each.uuid, each.name) for each in gpu.stages)
    devices = [stage.device for stage in stages]
    handoffs = StageHandoffs(handoff_sizes(plan, model), devices, gpu.patience_seconds, gpu.foresight)
    placement = expert_placement(gpu, model)
    stores = [
        HybridStore(stage.ops, placement, handoff, model.expert_channels)
        for stage, handoff in zip(stages, handoffs.stages, strict=True)
        if isinstance(stage.ops, GpuOps)
    ]
    numbers = [stage_of(stages, layer) for layer in model.moe_layers]
    return StagedSides(stages, StagedStore(stores, numbers), handoffs, placement)


def _stage(plan: Plan, model: ModelConfig, cpu: CpuOps, first: int, end: int, uuid: str, name: str) -> Stage:
    assert plan.gpu is not None
    device = planned_device(replace(plan.gpu, uuid=uuid, name=name))
    attention = attention_of(plan.gpu.attention, attention_shape(plan, model), device)
    return Stage(first, end, GpuOps(device, cpu, attention, plan.deterministic), device)


def staged_usage(config: EngineConfig, plan: Plan, model: ModelConfig, sides: StagedSides) -> StagedUsage | None:
    """Counts of each stage on its own GPU. None for a dense model."""
    layers = [[layer for layer in model.moe_layers if each.first <= layer < each.end] for each in sides.stages]
    residents = sides.placement.gpu_experts.split([len(each) for each in layers])
    parts = [
        expert_usage(config, plan, model, stage.device, resident)
        for stage, resident in zip(sides.stages, residents, strict=True)
    ]
    counting = [part for part in parts if part is not None]
    return StagedUsage(counting, sides.placement.gpu_experts) if counting else None


def staged_parts(parts: EngineParts, sides: StagedSides, streams: Sequence[ExpertStream | None] = ()) -> EngineParts:
    """parts: with a model that was built. streams: as of `stage_streams`."""
    end_posts(sides)
    begin_step = StagedStart(sides.stages, streams)
    return replace(parts, handoff=sides.handoffs, begin_step=begin_step, stages=sides.stages)


def end_posts(sides: StagedSides) -> None:
    """Says which layer's post is a step's last: after the model was built, before a graph is recorded."""
    on_cpu = [experts for experts in sides.store.layers if experts.cpu is not None]
    if on_cpu:
        on_cpu[-1].end_step()
