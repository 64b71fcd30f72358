"""The measured part of `kt bench experts`: a model with made-up weights decodes, one token a step, through its CUDA
graph, with experts chosen by a trace."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cli import bench_hybrid
from tandem.cli.placement_request import MEASURED, Request, Traffic, shape_columns
from tandem.cli.step_bound import Ceilings, Turn
from tandem.config import Plan
from tandem.engine.gpu_side import GpuSide, live_experts
from tandem.engine.loader import use_one_torch_thread
from tandem.experts.live_experts import LiveExperts
from tandem.experts.usage import Asked, Changes, Copy, Counted, ExpertUsage

TURN_TOKENS = 100
WARM_TOKENS = 20  # decoded before the clock starts; what is measured begins at the trace's first token


class _AskedOfTrace(NamedTuple):
    counts: Counted
    real: Asked

    def tokens(self) -> Counted:
        self.real.tokens()
        return self.counts


class TraceUsage:
    """Counts what the trace chose, where `ExpertUsage` counts what the router would have. That is asked and told as
    well, so that it takes its time. Nothing else is done between steps: counts lie ready, as the GPU has them ready
    when it serves, and hits are counted afterwards, by where experts were when they were used."""

    def __init__(self, real: ExpertUsage, trace: Tensor, on_gpu: Tensor) -> None:
        self._real, self._trace, self._on_gpu = real, trace, on_gpu.clone()
        self.tokens = 0  # of the trace, decoded so far
        self._counted = 0
        self._counts = counts_after_each(trace, on_gpu.shape[1]).numpy()
        self._moves: list[tuple[int, Changes]] = []  # tokens decoded before, in order
        self.hits = self.swaps = self.swap_rests = 0

    @property
    def copy(self) -> Copy | None:
        return self._real.copy

    @copy.setter
    def copy(self, how: Copy | None) -> None:
        self._real.copy = how

    def count(self) -> None:
        """`hits`, of the trace's tokens so far. It takes a while, so it is called when no clock runs."""
        for tokens, changes in self._moves:
            self._count_until(tokens)
            layers, experts, here = np.array(changes, np.int64).T
            self._on_gpu.numpy()[layers, experts] = here > 0
        self._moves.clear()
        self._count_until(self.tokens)

    def _count_until(self, tokens: int) -> None:
        here, layers = self._on_gpu.numpy(), np.arange(len(self._on_gpu))[:, None]
        self.hits += int(here[layers, self._trace[self._counted : tokens].numpy()].sum())
        self._counted = tokens

    def ask(self) -> _AskedOfTrace:
        return _AskedOfTrace(self._counts[self.tokens], self._real.ask())

    def moved(self, changes: Changes, swaps: int, now: _AskedOfTrace | None = None) -> None:
        self._real.moved(changes, swaps, None if now is None else now.real)
        self._moves.append((self.tokens, changes))
        self.swaps += swaps


def counts_after_each(trace: Tensor, experts: int) -> Tensor:
    """How often every expert was chosen before the first token, and after each: int32 [tokens + 1, layers, experts]."""
    counts = torch.zeros(len(trace) + 1, trace.shape[1], experts, dtype=torch.int32)
    counts[1:].scatter_(2, trace.long(), 1)  # a token's experts of a layer are distinct
    return counts.cumsum_(0)


def measured_rows(request: Request, seen: Traffic) -> Iterator[dict[str, Any]]:
    use_one_torch_thread()
    ceilings = Ceilings(_gpu_step_seconds(request), bench_hybrid.gpu_copy_gbps())
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.pt"
        torch.save(seen.counts, counts)
        for share in request.shares:
            for strategy in request.strategies:
                yield _row(request, ceilings, seen.trace, str(counts), strategy, share)
                gc.collect()  # the next model needs the memory of this one


def _gpu_step_seconds(request: Request) -> float:
    """Of a step without routed experts."""
    shape = _shape(request, 0.0)
    empty = bench_hybrid.build(shape, request.fmt, 0.0, empty=True)
    return statistics.median(
        bench_hybrid.step_times(empty, 1, dataclasses.replace(shape, steps=50, repeats=5))
    )


def _row(
    request: Request, ceilings: Ceilings, trace: Tensor, counts: str, strategy: str, share: float
) -> dict[str, Any]:
    layers, k = trace.shape[1], trace.shape[2]
    chosen = torch.zeros(layers, 1, k, dtype=torch.int32, device="cuda")
    usages: list[TraceUsage] = []
    moving: list[LiveExperts | None] = []

    def follow(plan: Plan, side: GpuSide, usage: ExpertUsage) -> LiveExperts | None:
        usages.append(TraceUsage(usage, trace, side.placement.on_gpu))
        moving.append(live_experts(plan, side, usages[0]))
        return moving[0]

    built = bench_hybrid.build(
        _shape(request, share), request.fmt, share, chosen=chosen, live=follow, **_flags(strategy, counts)
    )
    turns = _turns(built, request, chosen, trace, usages[0])
    seconds = sum(turn.seconds for turn in turns)
    return {
        **shape_columns(request, MEASURED, strategy, share), "tok_s": round(len(trace) / seconds, 2),
        **ceilings.columns(turns, built.config.expert_bytes(built.plan.expert_format)),
        "hit": round(usages[0].hits / trace.numel(), 4), "swaps": usages[0].swaps, "rests": usages[0].swap_rests,
        **_moving_columns(moving[0]),
    }  # fmt: skip


def _moving_columns(live: LiveExperts | None) -> dict[str, Any]:
    """moved_gb: both ways together; thread_us: what the engine's thread does for live placement, per step, and its
    parts; waited_us: of that, what the GPU may have stood still for, of which an exchange has its share."""
    if live is None:
        return {}
    times = live.times()
    per_step, each = 1e6 / max(1, times.steps), 1e3 / max(1, times.exchanges)
    return {
        "moved_gb": round(times.bytes_moved / 1e9, 2), "thread_us": round(times.seconds * per_step, 1),
        "waited_us": round(times.waited * per_step, 1),
        "thread_us_of": {part: round(seconds * per_step, 1) for part, seconds in times.parts.items()},
        "ms_per_exchange": round(times.waited * each, 4), "exchange_cost_reads": round(live.cost, 2),
    }  # fmt: skip


def _flags(strategy: str, counts: str) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "kt_expert_placement_strategy": "uniform" if strategy == "dynamic" else strategy,
        "kt_enable_dynamic_expert_update": strategy == "dynamic",
    }
    return flags | ({"init_expert_location": counts} if strategy == "frequency" else {})


def _shape(request: Request, share: float) -> bench_hybrid.Request:
    return bench_hybrid.Request(
        request.config, (request.fmt,), (share,), (1,), request.layers, request.context, request.tokens, 1,
        request.threads, request.tier,
    )  # fmt: skip


def _turns(
    built: bench_hybrid.Built, request: Request, chosen: Tensor, trace: Tensor, usage: TraceUsage
) -> list[Turn]:
    """The whole trace, some tokens at a time, and between them what memory gives: rows are measured minutes apart, and
    on a shared host it moves. Experts move from the trace's first token on, not before."""
    step = bench_hybrid.decoder(built, 1, request.context)
    reader = bench_hybrid.dram_reader(built)
    there = trace.to("cuda", torch.int32)[:, :, None]
    for _ in range(WARM_TOKENS):
        step()
    turns: list[Turn] = []
    for tokens in there.split(TURN_TOKENS):
        hits, started = usage.hits, perf_counter()
        for token in tokens:
            chosen.copy_(token)
            usage.tokens += 1
            step()
        seconds = perf_counter() - started
        usage.count()
        gbps = reader.mean_gbps(bench_hybrid.READ_SECONDS)
        turns.append(Turn(len(tokens), tokens.numel(), usage.hits - hits, seconds, gbps))
    return turns
