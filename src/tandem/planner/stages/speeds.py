"""`stage_speeds`: speeds of several unequal GPUs that take turns, as those of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.planner.forecast.speeds import GPU_FLOPS, GPU_GBPS, GpuModel, Speeds, gpu_model
from tandem.planner.gpu_plan import GpuPlan, StagePlan

BORDER_SECONDS = 2e-5  # of a step, from one GPU to the next: estimated, for no machine with two was measured


def stage_speeds(gpu: GpuPlan | None, speeds: Speeds) -> Speeds:
    """speeds: with the first stage's GPU; others are as much slower as their makers say. Each reads its own layers."""
    if gpu is None or not gpu.stages:
        return speeds
    gbps, flops = (_together(gpu.stages, value) for value in (_gbps, _flops))
    return replace(speeds, gpu_gbps=speeds.gpu_gbps * gbps, gpu_flops=speeds.gpu_flops * flops)


def border_seconds(gpu: GpuPlan | None) -> float:
    """Seconds of a step between all stages, and from the last one back."""
    return 0.0 if gpu is None else BORDER_SECONDS * len(gpu.stages)


def pipelined_share(seconds: Sequence[float], gpu: GpuPlan | None, starts: float) -> float:
    """Share of a prompt's time, of chunks that stages compute one behind the other. seconds: of each chunk, on all
    stages. The longest goes through all of them; the host takes `starts` to give all kernels."""
    stages, total = 1 if gpu is None else max(1, len(gpu.stages)), sum(seconds)
    if stages == 1 or len(seconds) == 1:
        return 1.0
    return max((total + (stages - 1) * max(seconds)) / stages, starts) / total


def _together(stages: tuple[StagePlan, ...], speed: Callable[[GpuModel | None], float]) -> float:
    """Times the first stage's speed."""
    known = [speed(gpu_model(stage.name)) for stage in stages]
    nbytes = [max(1, stage.nbytes) for stage in stages]
    return sum(nbytes) / sum(size * known[0] / own for size, own in zip(nbytes, known, strict=True))


def _gbps(model: GpuModel | None) -> float:
    return GPU_GBPS if model is None else model.gbps


def _flops(model: GpuModel | None) -> float:
    return GPU_FLOPS if model is None else model.flops
