"""`stage_streams`: experts in CPU memory are streamed to each stage's GPU, over its own bus and into its own ring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tandem.engine.stages.sides import StagedSides
from tandem.engine.start.gpu_side import GpuSide, registered, stream_of
from tandem.experts.hybrid_experts import HybridExperts
from tandem.experts.streaming.stream import ExpertStream, StreamReadings, streamed_layer
from tandem.experts.usage.staged_usage import StagedUsage
from tandem.kernels.gpu.ops import GpuOps
from tandem.models import Progress
from tandem.planner.plan import Plan


def stage_streams(
    plan: Plan, sides: StagedSides, usage: StagedUsage | None, progress: Progress | None = None
) -> list[ExpertStream | None]:
    """After the model was built, one for each stage; None for one without experts in CPU memory. [] where the experts
    of some stage are not streamed: a step is as long as all take it."""
    if plan.gpu is None or not plan.gpu.streams_experts:
        return []
    numbers = sorted({number for number, experts in _placed(sides) if experts.cpu is not None})
    streams: list[ExpertStream | None] = [None] * len(sides.stages)
    for number in numbers:
        with sides.stages[number].current():
            stream = _stream(plan, sides, number, usage, progress)
        if stream is None:
            return []
        streams[number] = stream
    for index, (number, experts) in enumerate(_placed(sides)):
        if number in numbers:
            experts.stream, experts.index = streams[number], index
    return streams if numbers else []


def _placed(sides: StagedSides) -> list[tuple[int, HybridExperts]]:
    """Each layer's stage and experts, in the model's order."""
    return list(zip(sides.store.stages, sides.store.layers, strict=True))


def _stream(
    plan: Plan, sides: StagedSides, number: int, usage: StagedUsage | None, progress: Progress | None
) -> ExpertStream | None:
    stage, handoff = sides.stages[number], sides.handoffs.stages[number]
    ops = stage.ops
    assert isinstance(ops, GpuOps)
    side = GpuSide(ops, sides.store.stores[number], handoff, sides.placement)
    copies = registered(plan, side, progress)
    if copies is None:
        return None
    layers = [
        streamed_layer(experts.cpu, experts.gpu, ops) if at == number else None
        for at, experts in _placed(sides)
    ]
    followed = StreamReadings(served=lambda: handoff.outside_times().serve_seconds)
    if usage is not None:
        followed = followed._replace(ask=partial(usage.ask_part, number))
    return stream_of(plan, stage.device, layers, copies, handoff.sizes.top_k, followed)


def step_seconds(streams: Sequence[ExpertStream | None]) -> float:
    """Seconds that all buses take in a step in which all experts are streamed, one stage after the other."""
    return sum(stream.step_seconds for stream in streams if stream is not None)
