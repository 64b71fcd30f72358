"""`kt bench decode --config`: decoding on a GPU with a share of the experts on it, beside what the hardware allows.

A step is what the engine does for `batch` sequences at a given context: inputs to the GPU, the model, logits back, the
most likely token of each. Its bound is a sum, measured in the same run:

- the GPU's own step without routed experts
- distinct experts' bytes ÷ bandwidth, of CPU memory or of GPU memory, whichever takes longer: both are read at the same
  time. The GPU's bandwidth is that of a large copy within it

DRAM is read where the experts lie, and its mean counts. Results until 21 November 2026 took the best of a buffer
elsewhere, so their shares are higher.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem import _core, models
from tandem.bench.architectures import named_config
from tandem.bench.ceilings import DramReader
from tandem.bench.decode_counts import StepCounts
from tandem.bench.decode_table import table
from tandem.bench.handoff_time import handoff_us
from tandem.bench.memory_ledger import UsedBytes, memory_columns, planned
from tandem.bench.rows import machine_name, shown, stamp
from tandem.bench.step_bound import gpu_step_bytes, paired_share
from tandem.bench.stored import expert_bytes, experts_of, format_name, stored_as
from tandem.bench.synthetic import FAR, SyntheticCheckpoint, SyntheticStore
from tandem.engine.expert_statistics import expert_usage
from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.ranks.joined import gpu_group, gpus_of_first
from tandem.engine.start.gpu_side import GpuSide, begin_step, expert_stream, gpu_side, registered
from tandem.engine.start.loader import rank_plan, use_one_torch_thread
from tandem.engine.state.arrays import allocate
from tandem.engine.step.batch import StepShape
from tandem.engine.step.hooks import StepHooks
from tandem.engine.step.host_batch import SequenceRows, host_batch
from tandem.errors import ConfigError
from tandem.experts.hybrid_store import HybridStore
from tandem.experts.live.copies import CudaCopies
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.placement import ExpertPlacement
from tandem.experts.streaming.stream import ExpertStream
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ranks.meeting import Meeting
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import caller_on, planned_pool
from tandem.machine.machine import Machine
from tandem.planner.cuda_graphs import split_sizes
from tandem.planner.forecast.bound import experts_seconds
from tandem.planner.plan import Plan
from tandem.planner.ranks.ranked import ranked
from tandem.planner.resolve import resolve
from tandem.spec.model_config import ModelConfig

WARM_STEPS = 5
READ_SECONDS = 0.1


class BenchPlace(NamedTuple):
    """machine: None: this one. meeting: with other ranks, which build the same at the same time; None: there are no
    others."""

    machine: Machine | None = None
    meeting: Meeting | None = None


HERE = BenchPlace()


@dataclasses.dataclass(frozen=True, slots=True)
class HybridFlags:
    """The flags of a run; context: tokens that every sequence has; dense: what dense projections are stored as,
    of `stored.FORMATS`; foresight: with it, without, or both in turn; prompts: those that fit are graphs, as in the
    server, and their tokens choose among all experts; eager_prompts: their tokens do, and none is a graph."""

    config: str
    formats: tuple[str, ...]
    shares: tuple[float, ...]
    batches: tuple[int, ...]
    layers: int | None
    context: int
    steps: int
    repeats: int
    threads: int | None
    tier: str = "auto"
    dense: str = "bf16"
    foresight: tuple[bool, ...] = (True,)
    prompts: bool = False
    eager_prompts: bool = False
    place: BenchPlace = HERE


@dataclasses.dataclass(slots=True)
class MeasuredSteps:
    """Seconds of a step and GB/s of reading DRAM, in turn; and what the steps used."""

    times: list[float]
    dram: list[float]
    counts: StepCounts = dataclasses.field(default_factory=StepCounts)


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A model on the GPU with `share` of its experts, ready to decode."""

    plan: Plan
    config: ModelConfig
    side: GpuSide
    runner: GpuRunner
    workers: _core.WorkerPool
    usage: ExpertUsage | None
    expert_bytes: int  # of one routed expert, packed
    new_runner: Callable[[], GpuRunner]
    stream: ExpertStream | None = None

    def stream_share(self, share: float | None) -> None:
        """So much of the experts in CPU memory in each prompt from now on; None: what is fastest."""
        if self.stream is not None:
            self.stream.rates.forced = share

    def counts(self) -> StepCounts:
        return StepCounts.now(self.side.handoff, self.usage)

    def with_foresight(self, foresight: bool) -> Built:
        """The same model, with graphs that hint or do not."""
        handoff = self.side.handoff
        if handoff.foresight == foresight:
            return self
        handoff.foresight = foresight
        runner = self.new_runner()
        handoff.foresight = not foresight
        return dataclasses.replace(self, runner=runner)


def foresight_modes(text: str) -> tuple[bool, ...]:
    """Parses the flag --foresight: the modes that it names, measured in turn. Raises ConfigError."""
    modes = {"on": (True,), "off": (False,), "both": (True, False)}
    if text not in modes:
        raise ConfigError(f"--foresight {text!r} is not known; give {', '.join(modes)}")
    return modes[text]


def run(request: HybridFlags, out: Path | None) -> None:
    use_one_torch_thread()
    if not Machine.detect().gpus:
        raise ConfigError("--config measures a GPU, and there is none; without one: kt bench decode MODEL")
    shown((row | _where(request) for row in measure(request)), table, out)


def measure(request: HybridFlags) -> Iterator[dict[str, Any]]:
    gpu_gbps = gpu_copy_gbps()
    empty = build(request, request.formats[0], 0.0, empty=True)
    yield {"bench": "handoff", "us": round(handoff_us(empty.side, empty.config), 2), "layers": 48}
    dense_seconds = {}
    for batch in request.batches:
        dense_seconds[batch] = statistics.median(step_times(empty, batch, request))
        nbytes = gpu_step_bytes(empty.config, stored_as(empty.config, request.dense), batch, request.context)
        yield {
            "bench": "gpu_step", **_shape(request, batch), "ms": round(dense_seconds[batch] * 1e3, 3),
            "mb": round(nbytes / 1e6), "times_bytes": round(dense_seconds[batch] * gpu_gbps * 1e9 / nbytes, 3),
        }  # fmt: skip
    del empty
    for fmt in request.formats:
        for share in request.shares:
            yield from _decode_rows(request, fmt, share, dense_seconds, gpu_gbps)


def _decode_rows(
    request: HybridFlags, fmt: str, share: float, dense_seconds: dict[int, float], gpu_gbps: float
) -> Iterator[dict[str, Any]]:
    empty = UsedBytes.now()
    built = build(request, fmt, share)
    expected = planned(built.plan, built.config, stored_as(built.config, request.dense, experts_of(fmt)))
    memory = memory_columns(expected, UsedBytes.now().since(empty))
    keys = _model(request) | {"format": format_name(fmt)}
    yield {"bench": "memory", **keys, "gpu_share": share, **memory}
    reader = dram_reader(built)
    each = {foresight: built.with_foresight(foresight) for foresight in request.foresight}
    for batch in request.batches:
        for foresight, measured in _in_turn(each, batch, request, reader).items():
            row = _decode_row(built, batch, request, measured, dense_seconds[batch], gpu_gbps)
            yield {
                "bench": "decode", **_shape(request, batch), "format": format_name(fmt), "gpu_share": share,
                "foresight": foresight, **row,
            }  # fmt: skip


def _decode_row(
    built: Built, batch: int, request: HybridFlags, measured: MeasuredSteps, dense_seconds: float, gpu_gbps: float
) -> dict[str, Any]:
    counts, steps = measured.counts, request.repeats * (WARM_STEPS + request.steps)
    used = counts.cpu_experts_per_step(len(built.config.moe_layers))
    gpu_experts = _gpu_experts_per_step(built, batch, used)
    nbytes = built.expert_bytes
    bounds = [dense_seconds + experts_seconds(used, gpu_experts, nbytes, gbps, gpu_gbps) for gbps in measured.dram]
    seconds, bound = statistics.median(measured.times), statistics.median(bounds)
    return {
        "tok_s": round(batch / seconds, 2), "step_ms": round(seconds * 1e3, 3),
        "bound_tok_s": round(batch / bound, 2), "share": round(paired_share(bounds, measured.times), 4),
        **counts.columns(steps),
        "cpu_experts_per_step": round(used, 1), "dram_gbps": round(statistics.median(measured.dram), 1),
        "hbm_gbps": round(gpu_gbps, 0),
    }  # fmt: skip


def _shape(request: HybridFlags, batch: int) -> dict[str, Any]:
    return _model(request) | {"batch": batch, "context": request.context}


def _model(request: HybridFlags) -> dict[str, Any]:
    config = named_config(request.config, request.layers)
    with_experts = len(config.moe_layers)
    return {
        "config": request.config, "layers": request.layers, "dense_layers": len(config.layers) - with_experts,
        "moe_layers": with_experts, "dense": request.dense,
    }  # fmt: skip


def _gpu_experts_per_step(built: Built, batch: int, cpu_experts: float) -> float:
    """Experts that the step reads from GPU memory: one sequence's are known exactly; of several, those of a uniform
    routing that are not on the CPU."""
    router, layers = built.config.moe.router, len(built.config.moe_layers)
    distinct = router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** batch) * layers
    return max(0.0, distinct - cpu_experts) if built.side.placement.total else 0.0


MakeLive = Callable[[Plan, GpuSide, ExpertUsage, CudaCopies | None], LiveExperts | None]


def build(
    request: HybridFlags,
    fmt: str,
    share: float,
    *,
    empty: bool = False,
    counted: bool = True,
    chosen: Tensor | None = None,
    live: MakeLive | None = None,
    placement: ExpertPlacement | None = None,
    **flags: Any,
) -> Built:
    """empty: without routed experts. counted: as in the server, `ExpertUsage` counts who is chosen. chosen: what is
    computed instead, as in `SyntheticStore`. placement: instead of what flags say; CPU memory then has a place for
    every expert. flags: more of `EngineConfig`'s; experts are streamed for long prompts where these say so."""
    meeting = request.place.meeting
    still = not flags.get("kt_enable_dynamic_expert_update", False)
    flags = {"kt_gpu_prefill_token_threshold": 0, "disable_dynamic_expert_update": still} | flags
    config = named_config(request.config, request.layers)
    positions = max(config.max_positions, request.context + 1024)  # of made-up weights, any
    config = dataclasses.replace(config, max_positions=positions)
    engine_config = EngineConfig.from_keywords(
        request.config, kt_method=fmt, kt_gpu_experts_ratio=0.0 if empty else share, kt_cpuinfer=request.threads,
        kernel_tier=request.tier, max_running_requests=max(request.batches), cuda_graph_bs=request.batches,
        disable_expert_foresight=request.foresight[0] is False,
        context_length=request.context + 1024, max_total_tokens=max(request.batches) * (request.context + 1024),
        device="cuda", disable_radix_cache=True, tp=1 if meeting is None else meeting.ranks, **flags,
    )  # fmt: skip
    stored, machine = stored_as(config, request.dense, experts_of(fmt)), request.place.machine or this_machine()
    plan = resolve(engine_config, config, machine, stored)
    if meeting is not None:
        own, config, machine = ranked(engine_config, config, machine, stored, meeting.rank)
        plan = rank_plan(gpus_of_first(plan, meeting), own, machine, meeting.rank)
    plan = dataclasses.replace(plan, num_window_pages=0)  # `decoder` gives all layers one table
    workers = planned_pool(plan)
    side = gpu_side(plan, config, CpuOps(workers, plan.tier, deterministic=plan.deterministic))
    if meeting is not None:
        side.ops.group = gpu_group(meeting, side.ops.device)
    if placement is not None:
        whole = HybridStore(
            side.ops, placement, side.handoff, config.expert_channels, plan.gpu is not None and plan.gpu.live
        )
        side = dataclasses.replace(side, placement=placement, store=whole)
    store = SyntheticStore(side.store, side.handoff, empty, chosen, whole=placement is not None)
    usage = expert_usage(engine_config, plan, config, side.ops.device, side.placement.gpu_experts) if counted else None
    embedded = FAR if request.prompts or request.eager_prompts else 1.0
    checkpoint: Any = SyntheticCheckpoint(request.dense, experts_of(fmt), embedded)
    model = models.build(config, plan, checkpoint, side.ops, None, store, usage=usage)
    copies = registered(plan, side)
    moving = None if live is None or usage is None else live(plan, side, usage, copies)
    stream = expert_stream(plan, side, copies, moving, usage)
    sizes = plan.gpu.sizes.prompt_sizes if request.prompts and plan.gpu is not None else ()
    splits = split_sizes(sizes) if stream else ()
    sizes = () if stream else sizes
    graphs = GraphPlan((), 0, prompts=sizes, no_decodes=not stream, splits=splits, one_stream=meeting is not None)
    runner = partial(_runner, plan, config, model, side, usage, moving, begin_step(side, stream, moving), graphs)
    return Built(plan, config, side, runner(), workers, usage, expert_bytes(config, fmt), runner, stream)


def _runner(
    plan: Plan,
    config: ModelConfig,
    model: models.AnyModel,
    side: GpuSide,
    usage: ExpertUsage | None,
    live: LiveExperts | None,
    begin: StepHooks,
    prompt_graphs: GraphPlan,
) -> GpuRunner:
    assert plan.gpu is not None
    layout = config.state_layout(plan.dtype, plan.page_size, plan.draft_tokens)
    states = allocate(layout, plan.num_pages, side.ops.device, plan.num_slots).arrays
    for array in (array for arrays in states for array in arrays):
        array.normal_()
    pages = -(-plan.context_length // plan.page_size)
    graphs = dataclasses.replace(
        prompt_graphs, sizes=plan.gpu.graph_sizes, pages=pages, speculative=plan.draft_tokens > 0
    )
    return GpuRunner(
        model, states, side.handoff, graphs, StepShape(plan.page_size, plan.max_step_tokens),
        usage=usage, live=live, begin_step=begin,
    )  # fmt: skip


def _in_turn(
    each: dict[bool, Built], batch: int, request: HybridFlags, reader: DramReader
) -> dict[bool, MeasuredSteps]:
    """Steps of each and reading DRAM, in turn, so that all see the same machine when others share it."""
    by_name = {name: MeasuredSteps([], []) for name in each}
    steps = {name: step_times(built, batch, request) for name, built in each.items()}
    for _ in range(request.repeats):
        for name, built in each.items():
            _add_repeat(by_name[name], built, steps[name])
            by_name[name].dram.append(reader.mean_gbps(READ_SECONDS))
    return by_name


def _add_repeat(measured: MeasuredSteps, built: Built, steps: Iterator[float]) -> None:
    before = built.counts()
    measured.times.append(next(steps))
    measured.counts = measured.counts.plus(built.counts().since(before))


def dram_reader(built: Built) -> DramReader:
    """A reader of the CPU's experts where they lie; of a buffer of its own, where there are none."""
    layers, where = built.side.handoff.layers, (built.workers, built.plan.tier)
    return DramReader.of(layers, *where) if layers else DramReader(*where)


def step_times(built: Built, batch: int, request: HybridFlags) -> Iterator[float]:
    """Seconds of the mean step, once per repeat."""
    step = decoder(built, batch, request.context)
    for _ in range(request.repeats):
        with caller_on(built.plan.cpus[0]):
            for _ in range(WARM_STEPS):
                step()
            started = perf_counter()
            for _ in range(request.steps):
                step()
            seconds = perf_counter() - started
        yield seconds / request.steps


def decoder(built: Built, batch: int, context: int) -> Callable[[], None]:
    """One decode step after the other, each fed with the tokens of the last; the position stays."""
    page = built.plan.page_size
    tables = np.arange(built.plan.num_pages // batch * batch, dtype=np.int32).reshape(batch, -1)
    rows = [
        SequenceRows([i * 7919 % built.config.vocab], context - 1, table[: -(-context // page)], slot=i + 1)
        for i, table in enumerate(tables)
    ]
    state = host_batch(rows, page)
    ids = state.input_ids.numpy()  # filled anew, as the engine does with its arrays

    def step() -> None:
        with torch.inference_mode():
            ids[:] = built.runner.logits(state).best[:, 0]

    return step


def gpu_copy_gbps() -> float:
    """GB/s of GPU memory: bytes read and written by a copy of 2 GiB."""
    source = torch.ones(1 << 31, dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(10):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        target.copy_(source)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return float(2 * source.numel() / min(times) / 1e6)


def _where(request: HybridFlags) -> dict[str, Any]:
    return stamp(machine_name(Machine.detect(), request.threads))
