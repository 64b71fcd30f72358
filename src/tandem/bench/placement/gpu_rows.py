"""The measured part of `kt bench experts`: a model with made-up weights decodes, one token a step, through its CUDA
graph, with experts chosen by a trace. Strategies are measured in turn, on one model (`placement_turns`); those that
cannot be, each on its own."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tandem.bench import hybrid as bench_hybrid
from tandem.bench.placement.request import MEASURED, PlacementFlags, Traffic, shape_columns
from tandem.bench.placement.trace_usage import TraceUsage
from tandem.bench.placement.turns import (
    TURN_TOKENS,
    WARM_TOKENS,
    model_shape,
    moving_columns,
    rows_in_turn,
)
from tandem.bench.step_bound import StepCeilings, TimedTokens
from tandem.engine.start.gpu_side import GpuSide, live_experts
from tandem.engine.start.loader import use_one_torch_thread
from tandem.experts.live.copies import CudaCopies
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.planner.plan import Plan


def measured_rows(request: PlacementFlags, traffic: Traffic) -> Iterator[dict[str, Any]]:
    use_one_torch_thread()
    ceilings = StepCeilings(_gpu_step_seconds(request), bench_hybrid.gpu_copy_gbps())
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.pt"
        torch.save(traffic.counts, counts)
        for share in request.shares:
            rows = rows_in_turn(request, ceilings, traffic, share)
            gc.collect()  # the next model needs the memory of this one
            for strategy in request.strategies:
                yield rows.get(strategy) or _row(request, ceilings, traffic.trace, str(counts), strategy, share)
                gc.collect()


def _gpu_step_seconds(request: PlacementFlags) -> float:
    """Seconds of a step without routed experts, the median."""
    shape = model_shape(request, 0.0)
    empty = bench_hybrid.build(shape, request.fmt, 0.0, empty=True)
    return statistics.median(
        bench_hybrid.step_times(empty, 1, dataclasses.replace(shape, steps=50, repeats=5))
    )


def _row(
    request: PlacementFlags, ceilings: StepCeilings, trace: Tensor, counts: str, strategy: str, share: float
) -> dict[str, Any]:
    layers, k = trace.shape[1], trace.shape[2]
    chosen = torch.zeros(layers, 1, k, dtype=torch.int32, device="cuda")
    usages: list[TraceUsage] = []
    moving: list[LiveExperts | None] = []

    def follow(
        plan: Plan, side: GpuSide, usage: ExpertUsage, copies: CudaCopies | None
    ) -> LiveExperts | None:
        usages.append(TraceUsage(usage, trace, side.placement.gpu_experts))
        moving.append(live_experts(plan, side, usages[0], copies))
        return moving[0]

    built = bench_hybrid.build(
        model_shape(request, share),
        request.fmt,
        share,
        chosen=chosen,
        live=follow,
        **_flags(strategy, counts),
    )
    turns = _turns(built, request, chosen, trace, usages[0])
    seconds = sum(turn.seconds for turn in turns)
    return {
        **shape_columns(request, MEASURED, strategy, share), "tok_s": round(len(trace) / seconds, 2),
        **ceilings.columns(turns, built.expert_bytes),
        "hit": round(usages[0].hits / trace.numel(), 4), "swaps": usages[0].swaps, "rests": usages[0].swap_rests,
        **moving_columns(moving[0]),
    }  # fmt: skip


def _flags(strategy: str, counts: str) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "kt_expert_placement_strategy": "uniform" if strategy == "dynamic" else strategy,
        "kt_enable_dynamic_expert_update": strategy == "dynamic",
    }
    return flags | ({"init_expert_location": counts} if strategy == "frequency" else {})


def _turns(
    built: bench_hybrid.Built, request: PlacementFlags, chosen: Tensor, trace: Tensor, usage: TraceUsage
) -> list[TimedTokens]:
    """The whole trace, some tokens at a time, and between them what memory gives: rows are measured minutes apart, and
    on a shared host it moves. Experts move from the trace's first token on, not before."""
    step = bench_hybrid.decoder(built, 1, request.context)
    reader = bench_hybrid.dram_reader(built)
    routed = trace.to("cuda", torch.int32)[:, :, None]
    for _ in range(WARM_TOKENS):
        step()
    turns: list[TimedTokens] = []
    for tokens in routed.split(TURN_TOKENS):
        hits, started = usage.hits, perf_counter()
        for token in tokens:
            chosen.copy_(token)
            usage.tokens += 1
            step()
        seconds = perf_counter() - started
        usage.count()
        gbps = reader.mean_gbps(bench_hybrid.READ_SECONDS)
        turns.append(TimedTokens(len(tokens), tokens.numel(), usage.hits - hits, seconds, gbps))
    return turns
