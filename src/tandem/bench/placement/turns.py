"""Strategies in turn on one model: on a shared host, what is measured minutes apart is not comparable.

All experts of a made-up layer have the same bytes. So one set of slots on the GPU serves every strategy, for what is in
a slot is what its table says; and CPU memory has a place for every expert. Which of them is on which side, and so which
bytes are read, is as if each strategy had a model of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor

from tandem.bench import hybrid as bench_hybrid
from tandem.bench.architectures import named_config
from tandem.bench.placement.request import MEASURED, PlacementFlags, Traffic, shape_columns
from tandem.bench.placement.trace_usage import TraceUsage
from tandem.bench.step_bound import StepCeilings, TimedTokens
from tandem.bench.stored import expert_bytes
from tandem.engine.start.gpu_side import GpuSide, live_experts
from tandem.experts.live.copies import CudaCopies
from tandem.experts.live.exchange import LiveLayer
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.placement import ExpertPlacement, place
from tandem.experts.residency import Location, on_location
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.workers import caller_on
from tandem.machine.machine import Machine
from tandem.planner.memory import DEFAULT_FRACTION
from tandem.planner.plan import Plan

TURN_TOKENS = 100
WARM_TOKENS = 20  # decoded before the clock starts; what is measured begins at the trace's first token


def moving_columns(live: LiveExperts | None) -> dict[str, Any]:
    """Columns of live placement. moved_gb: both ways together. The others are per step: thread_us and thread_us_of: the
    engine's thread, and its parts; waited_us: of that, what the GPU may have stood still for; hidden_us: the rest of
    it; put_off: steps that left work to a later one; beside_us: between layers, not in thread_us."""
    if live is None:
        return {}
    times = live.times()
    per_step, each = 1e6 / max(1, times.steps), 1e3 / max(1, times.exchanges)
    return {
        "moved_gb": round(times.bytes_moved / 1e9, 2), "thread_us": round(times.seconds * per_step, 1),
        "waited_us": round(times.waited * per_step, 1), "hidden_us": round(times.hidden * per_step, 1),
        "put_off": round(times.put_off / max(1, times.steps), 3),
        "beside_us": round(times.overlapped_seconds * per_step, 1),
        "thread_us_of": {part: round(seconds * per_step, 1) for part, seconds in times.parts.items()},
        "ms_per_exchange": round(times.waited * each, 4), "exchange_cost_reads": round(live.cost, 2),
    }  # fmt: skip


def model_shape(request: PlacementFlags, share: float) -> bench_hybrid.HybridFlags:
    return bench_hybrid.HybridFlags(
        request.config, (request.fmt,), (share,), (1,), request.layers, request.context, request.tokens, 1,
        request.threads, request.tier,
    )  # fmt: skip


def placements(request: PlacementFlags, traffic: Traffic, share: float) -> dict[str, ExpertPlacement]:
    """Placements by strategy, of those that can be measured in turn: every layer has experts on both sides. A hand-off
    that is not needed, as where a whole layer is on the GPU, is not in the graph of a model of its own."""
    layers, experts = traffic.counts.shape
    by_strategy = {}
    for name in request.strategies:
        start_strategy = "uniform" if name == "dynamic" else name
        placement = place(start_strategy, layers, experts, round(share * layers * experts), traffic.counts)
        counts = placement.gpu_experts.sum(1)
        if 0 < int(counts.min()) <= int(counts.max()) < experts:
            by_strategy[name] = placement
    return by_strategy if len(by_strategy) > 1 else {}


def room_for(by_strategy: dict[str, ExpertPlacement]) -> ExpertPlacement:
    """As many slots in each layer as any of them needs."""
    most = torch.stack([placement.gpu_experts.sum(1) for placement in by_strategy.values()]).amax(0)
    experts = next(iter(by_strategy.values())).gpu_experts.shape[1]
    return ExpertPlacement(torch.arange(experts) < most[:, None])


class Sides:
    """Says where experts are: in the tables on the GPU, and in CPU memory, which has places for all of them."""

    def __init__(self, layers: list[LiveLayer], experts: int) -> None:
        self._layers, self._experts = layers, experts
        self._in_memory = torch.ones(len(layers), experts, dtype=torch.bool)

    def show(self, slots: Tensor, exclusive: bool) -> None:
        """slots int [layers, experts], -1: in CPU memory. exclusive: those on the GPU have no place in CPU memory, so
        that they may change places."""
        in_memory = on_location(Location.CPU, slots) if exclusive else torch.ones_like(self._in_memory)
        for index, layer in enumerate(self._layers):
            gpu: Any = layer.gpu  # GpuExperts
            gpu.slot_of[: self._experts] = slots[index]
            gpu.table.copy_(gpu.slot_of)
            for expert in (in_memory[index] != self._in_memory[index]).nonzero().flatten().tolist():
                if in_memory[index, expert]:
                    layer.cpu.assign(expert, layer.cpu.reserve(expert))
                else:
                    layer.cpu.forget(expert)
        self._in_memory = in_memory

    def shown(self) -> Tensor:
        """Where they are now, after exchanges."""
        slots = torch.stack([layer.gpu.slot_of[: self._experts] for layer in self._layers])
        self._in_memory = on_location(Location.CPU, slots)
        return slots


class Switched:
    """`LiveExperts` of one strategy, in a model that decodes for others, too."""

    def __init__(self, live: LiveExperts) -> None:
        self.live, self.on = live, False

    def moves(self) -> int | None:
        return self.live.moves()

    @property
    def settling(self) -> bool:
        return self.live.settling

    def pause(self) -> None:
        self.live.pause()

    def resume(self) -> None:
        self.live.resume()

    def beside_step(self) -> None:
        if self.on:
            self.live.beside_step()

    def after_step(self, over: Callable[[], bool]) -> None:
        if self.on:
            self.live.after_step(over)


@dataclasses.dataclass(slots=True)
class Contestant:
    """One strategy; slots int32 [layers, experts]: where experts were when its turn ended."""

    slots: Tensor
    usage: TraceUsage
    live: Switched | None
    turns: list[TimedTokens] = dataclasses.field(default_factory=list)


class OneModel:
    """`placements` of one share, ready to decode in turn."""

    def __init__(
        self, request: PlacementFlags, traffic: Traffic, share: float, by_strategy: dict[str, ExpertPlacement]
    ) -> None:
        self._by_strategy, self._trace, self._contestants = by_strategy, traffic.trace, dict[str, Contestant]()
        layers, k = traffic.trace.shape[1:]
        self._chosen = torch.zeros(layers, 1, k, dtype=torch.int32, device="cuda")
        self.built = bench_hybrid.build(
            model_shape(request, share), request.fmt, share, chosen=self._chosen, live=self._follow,
            placement=room_for(by_strategy), kt_enable_dynamic_expert_update="dynamic" in by_strategy,
        )  # fmt: skip
        sides = [experts.sides for _, experts in sorted(self.built.side.store.layers.items())]
        self._sides = Sides([side for side in sides if side is not None], traffic.counts.shape[1])
        self._step = bench_hybrid.decoder(self.built, 1, request.context)

    def _follow(
        self, plan: Plan, side: GpuSide, usage: ExpertUsage, copies: CudaCopies | None = None
    ) -> LiveExperts | None:
        for name, placement in self._by_strategy.items():
            traced, switched = TraceUsage(usage, self._trace, placement.gpu_experts), None
            if name == "dynamic":
                placed = dataclasses.replace(side, placement=placement)
                live = live_experts(plan, placed, traced, copies)
                switched = None if live is None else Switched(live)
            slots = torch.stack([placement.slots(layer) for layer in range(len(placement.gpu_experts))])
            self._contestants[name] = Contestant(slots, traced, switched)
        moving = [each.live for each in self._contestants.values() if each.live is not None]
        return cast(LiveExperts, moving[0]) if moving else None

    def run(self) -> dict[str, Contestant]:
        """The whole trace, some tokens at a time for each strategy, forwards and backwards through the strategies; and
        after each what memory gives. Experts move from the trace's first token on, not before."""
        reader = bench_hybrid.dram_reader(self.built)
        trace = self._trace.to(self._chosen.device, torch.int32)[:, :, None]
        self._sides.show(next(iter(self._contestants.values())).slots, exclusive=False)
        for _ in range(WARM_TOKENS):
            self._step()
        order = list(self._contestants.values())
        for tokens in trace.split(TURN_TOKENS):
            for each in order:
                used, hits, seconds = self._turn(each, tokens)
                gbps = reader.mean_gbps(bench_hybrid.READ_SECONDS)
                each.turns.append(TimedTokens(len(tokens), used, hits, seconds, gbps))
            order.reverse()
        return self._contestants

    def _turn(self, each: Contestant, tokens: Tensor) -> tuple[int, int, float]:
        """Experts used, hits, seconds. What is under way at its end is waited for when no clock runs."""
        self._sides.show(each.slots, exclusive=each.live is not None)
        if each.live is not None:
            each.live.on = True
        hits, started = each.usage.hits, perf_counter()
        for token in tokens:
            self._chosen.copy_(token)
            each.usage.tokens += 1
            self._step()
        seconds = perf_counter() - started
        if each.live is not None:
            each.live.on = False
            each.live.live.finish()
            each.slots = self._sides.shown()
        each.usage.count()
        return tokens.numel(), each.usage.hits - hits, seconds


def rows_in_turn(
    request: PlacementFlags, ceilings: StepCeilings, traffic: Traffic, share: float
) -> dict[str, dict[str, Any]]:
    """By strategy; of none if fewer than two can be measured so, or there is no memory for it."""
    by_strategy = placements(request, traffic, share)
    if not by_strategy or not _room(request, traffic):
        return {}
    try:
        model = OneModel(request, traffic, share, by_strategy)
    except torch.OutOfMemoryError as error:
        _warn(f"GPU memory has no room for the slots of all: {error}")
        return {}
    with caller_on(model.built.plan.cpus[0]):
        contestants = model.run()
    rows = {}
    for name, each in contestants.items():
        seconds = sum(turn.seconds for turn in each.turns)
        rows[name] = {
            **shape_columns(request, MEASURED, name, share), "in_turn_with": [n for n in by_strategy if n != name],
            "tok_s": round(len(traffic.trace) / seconds, 2), **ceilings.columns(each.turns, model.built.expert_bytes),
            "hit": round(each.usage.hits / traffic.trace.numel(), 4), "swaps": each.usage.swaps,
            "rests": each.usage.swap_rests, **moving_columns(None if each.live is None else each.live.live),
        }  # fmt: skip
    return rows


def _room(request: PlacementFlags, workload: Traffic) -> bool:
    """In CPU memory, for every expert."""
    each = expert_bytes(named_config(request.config, request.layers), request.fmt)
    needed, free = each * workload.counts.numel(), DEFAULT_FRACTION * Machine.detect().available_memory
    if needed > free:
        _warn(f"all experts take {needed / 2**30:.1f} GiB of CPU memory, and {free / 2**30:.1f} may be used")
    return needed <= free


def _warn(why: str) -> None:
    Console().print(f"Strategies are measured one after the other, at different times: {why}")
