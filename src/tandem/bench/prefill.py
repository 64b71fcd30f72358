"""`kt bench prefill`: prompts on a GPU with a share of the experts on it, beside what the hardware allows.

A prompt is what the engine does for one sequence: chunks through the model, logits of the last row. Bus, CPU and GPU
work at the same time, so the slowest of them counts. The bus takes bytes of experts in CPU memory; the others take
operations, or reads of their memory. The bound is that of the best division of the experts' work. All rates are
measured in the same run. Experts in CPU memory may be left to the CPU or to the bus alone, in turn with the usual
division; or they may move between prompts, as live placement has them, with steps that decode in between.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from tandem.bench import hybrid
from tandem.bench.ceilings import measure_flops
from tandem.bench.placement.turns import Switched
from tandem.bench.probes import GpuSpeeds, gpu_speeds
from tandem.bench.rows import kept_rows, machine_name, say, stamp
from tandem.bench.stored import format_name
from tandem.engine.start.gpu_side import GpuSide, live_experts
from tandem.engine.start.loader import use_one_torch_thread
from tandem.engine.step.host_batch import SequenceRows, host_batch
from tandem.errors import ConfigError
from tandem.experts.live.copies import CudaCopies
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.machine.machine import Machine
from tandem.models import ForwardBatch
from tandem.planner.forecast.attention import attention_flops
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig

SPLITS = 100
LIVE = "live"
WAYS = {"auto": None, "cpu": 0.0, "bus": 1.0, LIVE: None}  # the streamed share of the experts in CPU memory
STEPS_BETWEEN = 32  # that decode one token, between prompts, where experts may move


@dataclass(frozen=True, slots=True)
class PrefillFlags:
    """The flags of a run. chunk: tokens of a step at most; threshold: rows from which experts are streamed, None: where
    it pays; cached: tokens before each prompt, whose keys and values are there; ways: of `WAYS`, measured in turn."""

    config: str
    formats: tuple[str, ...]
    shares: tuple[float, ...]
    tokens: tuple[int, ...]
    layers: int | None = None
    chunk: int = 8192
    threshold: int | None = None
    repeats: int = 3
    threads: int | None = None
    tier: str = "auto"
    cached: int = 0
    ways: tuple[str, ...] = ("auto",)

    def model(self) -> hybrid.HybridFlags:
        """As the decode bench builds one."""
        sizes = (self.layers, self.cached + max(self.tokens), 1, self.repeats, self.threads, self.tier)
        return hybrid.HybridFlags(self.config, self.formats, self.shares, (1,), *sizes, prompts=True)


@dataclass(frozen=True, slots=True)
class Rates:
    """GB/s of the CPU's memory, and of its multiply-adds operations per second; and the GPU's."""

    dram_gbps: float
    cpu_flops: float
    gpu: GpuSpeeds


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt's operations and bytes: of what is always on the GPU; of all routed experts, and their share there."""

    dense_flops: float
    dense_bytes: float
    expert_flops: float
    expert_bytes: float
    gpu_share: float

    def bound_seconds(self, rates: Rates) -> float:
        return min(self._seconds(rates, i / SPLITS) for i in range(SPLITS + 1))

    def _seconds(self, rates: Rates, streamed_share: float) -> float:
        """streamed_share: of the experts in CPU memory."""
        cpu_share = 1 - self.gpu_share
        gpu_part, cpu_part = self.gpu_share + streamed_share * cpu_share, (1 - streamed_share) * cpu_share
        bus = streamed_share * cpu_share * self.expert_bytes / (rates.gpu.to_gpu_gbps * 1e9)
        cpu = cpu_part * max(self.expert_flops / rates.cpu_flops, self.expert_bytes / (rates.dram_gbps * 1e9))
        flops, nbytes = self.dense_flops + gpu_part * self.expert_flops, self.dense_bytes + gpu_part * self.expert_bytes
        return max(bus, cpu, flops / rates.gpu.flops, nbytes / (rates.gpu.gbps * 1e9))


def work_of(model: ModelConfig, packed: int, tokens: int, gpu_share: float, cached: int = 0) -> Work:
    """packed: bytes of one routed expert; cached: tokens before."""
    head = model.vocab * model.hidden  # one row of it
    dense = (model.dense_params - head) * 2.0 * tokens + 2.0 * head
    top_k, each = model.moe.router.top_k, model.moe.experts.params(model.hidden)
    experts = 2.0 * tokens * top_k * each * len(model.moe_layers)
    used = model.routed_experts * (1 - (1 - top_k / model.moe.router.num_experts) ** tokens)
    attention = attention_flops(model, tokens, cached, per_head=True)
    nbytes = model.dense_bytes("bfloat16", for_gpu=True), used * packed
    return Work(dense + attention, nbytes[0], experts, nbytes[1], gpu_share)


def run(request: PrefillFlags, out: Path | None) -> None:
    if unknown := [way for way in request.ways if way not in WAYS]:
        raise ConfigError(f"--way {unknown[0]!r} is not known; give {', '.join(WAYS)}")
    use_one_torch_thread()
    if not Machine.detect().gpus:
        raise ConfigError("kt bench prefill measures a GPU, and there is none")
    console, columns = Console(), stamp(machine_name(Machine.detect(), request.threads))
    with kept_rows(out) as rows:
        for row in measure(request):
            rows.append(row | columns)
            say(console, row)


def measure(request: PrefillFlags) -> Iterator[dict[str, Any]]:
    gpu = gpu_speeds()
    assert gpu is not None
    for fmt in request.formats:
        for share in request.shares:
            moving = _Moving()
            built = hybrid.build(
                request.model(), fmt, share, chunked_prefill_size=request.chunk,
                kt_gpu_prefill_token_threshold=request.threshold, live=moving.start,
                kt_enable_dynamic_expert_update=LIVE in request.ways,
            )  # fmt: skip
            dram = hybrid.dram_reader(built).mean_gbps()
            rates = Rates(dram, measure_flops(built.workers, built.plan.tier, min_seconds=0.1), gpu)
            for tokens in request.tokens:
                for row in _rows(request, built, tokens, share, rates, moving):
                    yield row | {"format": format_name(fmt)}


def _rows(
    request: PrefillFlags, built: hybrid.Built, tokens: int, share: float, rates: Rates, moving: _Moving
) -> Iterator[dict[str, Any]]:
    cached = request.cached
    bound = work_of(built.config, built.expert_bytes, tokens, share, cached).bound_seconds(rates)
    for way, times in _in_turn(request, built, tokens, moving).items():
        seconds = statistics.median(times)
        yield {
            "bench": "prefill", "config": request.config, "layers": request.layers, "gpu_share": share,
            "tokens": tokens, "cached": cached, "way": way, "tok_s": round(tokens / seconds, 1),
            "bound_tok_s": round(tokens / bound, 1), "share": round(bound / seconds, 4), "chunk": request.chunk,
            "threshold": request.threshold, "experts": "all chosen", "dram_gbps": round(rates.dram_gbps, 1),
            "pcie_gbps": rates.gpu.to_gpu_gbps,
        }  # fmt: skip


class _Moving:
    """Live placement of a model whose prompts are measured without it, too."""

    def __init__(self) -> None:
        self._switched: Switched | None = None

    def start(
        self, plan: Plan, side: GpuSide, usage: ExpertUsage, copies: CudaCopies | None
    ) -> LiveExperts | None:
        live = live_experts(plan, side, usage, copies)
        self._switched = None if live is None else Switched(live)
        return cast(LiveExperts | None, self._switched)

    def turn(self, on: bool, step: Callable[[], object]) -> None:
        """Steps before a prompt, after which exchanges may be under way."""
        if self._switched is None:
            return
        self._switched.on = on
        for _ in range(STEPS_BETWEEN):
            step()
        if not on:
            self._switched.live.finish()


def _in_turn(
    request: PrefillFlags, built: hybrid.Built, tokens: int, moving: _Moving
) -> dict[str, list[float]]:
    """Seconds of prompts, by way."""
    seconds = {way: list[float]() for way in request.ways}
    prompts = {way: prompt_seconds(built, tokens, request.repeats, request.cached) for way in seconds}
    step = hybrid.decoder(built, 1, request.cached + max(request.tokens))
    for _ in range(request.repeats):
        for way, times in seconds.items():
            built.stream_share(WAYS[way])
            moving.turn(way == LIVE, step)
            times.append(next(prompts[way]))
    return seconds


def prompt_seconds(built: hybrid.Built, tokens: int, repeats: int, cached: int = 0) -> Iterator[float]:
    """Seconds of a prompt from nothing, or after so many tokens, one for each repeat; one before warms up."""
    for repeat in range(repeats + 1):
        started = perf_counter()
        with torch.inference_mode():
            for first in range(cached, cached + tokens, built.plan.max_step_tokens):
                last = min(first + built.plan.max_step_tokens, cached + tokens)
                built.runner.logits(chunk_of(built, first, last, repeat))
        if repeat:
            yield perf_counter() - started


def chunk_of(built: hybrid.Built, first: int, last: int, seed: int = 0, pinned: bool = False) -> ForwardBatch:
    """Tokens [first, last) of the one sequence. seed: of which tokens; prompts differ. pinned: in such memory."""
    page, generator = built.plan.page_size, torch.Generator().manual_seed(seed << 32 | first)
    ids = torch.randint(built.config.vocab, (last - first,), generator=generator)
    table = np.arange(-(-last // page), dtype=np.int32)
    return host_batch([SequenceRows(ids.numpy(), first, table, slot=1)], page, pinned)
