"""Rows of scripted drafts: what draft tokens gain, if so many are accepted and neighbours share so many experts;
governed, and at fixed widths, each beside decoding without drafts, in turn.

Answers are said in advance, and so are experts: weights are made up. What is computed costs what it costs.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.table import Table

from scripted_drafts.parts import ScriptedSetup, told_parts
from scripted_drafts.plot import draw
from scripted_drafts.turns import ScriptedDrafts, ScriptedLoad, Timed, TimedPair, TimedTurns
from tandem.bench.ceilings import DramReader
from tandem.bench.figures import check_matplotlib
from tandem.bench.gaps.made_up import write_folder
from tandem.bench.rows import machine_name, progress, shown, stamp
from tandem.bench.speculation import governed
from tandem.bench.step_bound import gpu_step_bytes
from tandem.bench.stored import expert_bytes, experts_of, format_name, stored_as
from tandem.engine.protocol import SpeculationStats
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.free_memory import return_free_memory
from tandem.machine.machine import Machine
from tandem.planner.choices.speculation import DRAFT_ALGORITHMS, check_algorithm, default_draft_tokens
from tandem.planner.forecast.bound import experts_seconds

_ALGORITHMS = {"NGRAM": "foretold", "NEXTN": "NEXTN, foretold", "DSPARK": "DSPARK, foretold"}
READ_SECONDS = 0.2
ROOM = 64  # tokens of a sequence beside its prompt and its answer


@dataclass(frozen=True, slots=True)
class ScriptedFlags:
    """The flags of a run. fixed: widths that are measured as well; draft_seconds: of each draft token."""

    config: str
    formats: tuple[str, ...]
    shares: tuple[float, ...]
    batches: tuple[int, ...]
    acceptances: tuple[float, ...]
    overlap: float
    most: int
    governed: bool
    fixed: tuple[int, ...]
    layers: int | None
    context: int
    tokens: int
    repeats: int
    threads: int | None
    tier: str
    dense: str
    draft_seconds: float
    algorithm: str = "NGRAM"  # or NEXTN, DSPARK: a draft layer does its work, and its draft tokens are replaced

    @property
    def widths(self) -> list[tuple[int, bool]]:
        """Most draft tokens, and whether each step has as many as pay."""
        return [*([(self.most, True)] if self.governed else []), *((width, False) for width in self.fixed)]

    @property
    def widest(self) -> int:
        """Draft tokens of a sequence that some step may have: it is planned for them."""
        return max(self.most, *self.fixed) if self.fixed else self.most


def request(flags: Mapping[str, Any]) -> ScriptedFlags:
    """Reads a request from the parameters of the command. Raises ConfigError."""
    algorithm = check_algorithm(flags["speculative"])
    algorithm = "NEXTN" if algorithm == "EAGLE" else algorithm
    if algorithm in DRAFT_ALGORITHMS and flags["draft_ms"]:
        raise ConfigError(
            f"--draft-ms is what a draft token takes that no layer draws, and {algorithm}'s layer takes its own time: "
            "leave --draft-ms out, or give --speculative NGRAM"
        )
    most = flags["num_steps"] or default_draft_tokens(algorithm)
    acceptances = flags["acceptance"] or [0.0, 0.5, 0.7, 0.9, 1.0]
    return ScriptedFlags(
        flags["config"], tuple(flags["fmt"] or ["BF16"]), tuple(flags["gpu_share"] or [0.0, 0.5, 1.0]),
        tuple(flags["batch"] or [1, 8]), tuple(acceptances), flags["overlap"], most, flags["governor"],
        tuple(flags["fixed"] or ()), flags["layers"], flags["context"], flags["steps"], flags["repeats"],
        flags["threads"], flags["tier"], flags["dense_format"], (flags["draft_ms"] or 0.0) / 1e3,
        algorithm,
    )  # fmt: skip


class MemoryRates(NamedTuple):
    """GB/s; hbm: 0 without a GPU."""

    dram: float
    hbm: float


def run(request: ScriptedFlags, out: Path | None, plot: Path | None = None) -> None:
    if plot is not None:
        check_matplotlib()
    rows = shown(measure(request), table, out)
    if plot is not None:
        draw(plot, rows)


def measure(request: ScriptedFlags) -> Iterator[dict[str, Any]]:
    hbm = _hbm_gbps()
    for fmt in request.formats:
        for share in request.shares if hbm else (0.0,):
            yield from _of_share(request, fmt, share, hbm)
            gc.collect()
            return_free_memory()


def _hbm_gbps() -> float:
    if not Machine.detect().gpus:
        return 0.0
    from tandem.bench.hybrid import gpu_copy_gbps  # Triton is there only where a GPU is

    return gpu_copy_gbps()


def _of_share(request: ScriptedFlags, fmt: str, share: float, hbm: float) -> Iterator[dict[str, Any]]:
    progress(f"{request.config}, {fmt}, {share:.0%} of the experts on the GPU: weights")
    with TemporaryDirectory(prefix="tandem-bench-") as folder:
        write_folder(Path(folder), request.config, request.layers)
        scripted = told_parts(_config(request, folder, fmt, share), request.dense, request.overlap)
    if scripted.parts.plan.gpu is not None:
        check_rows(request, scripted.parts.plan.gpu.graph_sizes)
    progress("how fast this memory is read")
    ceilings = MemoryRates(_reader(scripted).mean_gbps(READ_SECONDS), hbm)
    for batch in request.batches:
        progress(f"batch {batch}: first steps without drafts")
        turns = TimedTurns(scripted, ScriptedLoad(batch, request.context, request.tokens))
        for most, pays in request.widths:
            for acceptance in request.acceptances:
                progress(f"batch {batch}, acceptance {acceptance:g}, {'up to' if pays else 'always'} {most} drafts")
                drafts = ScriptedDrafts(request.algorithm, acceptance, most, pays, request.draft_seconds)
                pairs, stats = turns.measure(drafts, request.repeats)
                bound = _bounds(request, scripted, batch, fmt, ceilings)
                yield (
                    _row(request, scripted, fmt, share, batch, drafts)
                    | _figures(pairs, stats, bound)
                    | governed(stats)
                    | _stamp(request)
                )


def check_rows(request: ScriptedFlags, graph_sizes: Sequence[int]) -> None:
    """Raises ConfigError where a step has more rows than the largest graph: what its experts use is not counted."""
    largest = max(graph_sizes, default=0)
    for batch in request.batches:
        for width, pays in request.widths:
            if (rows := batch * (1 + width)) > largest:
                flag = "--speculative-num-steps" if pays else "--fixed"
                raise ConfigError(
                    f"--batch {batch} with {flag} {width} has {rows} rows in a step, and the largest CUDA graph has "
                    f"{largest}; the CPU's experts are counted in graphs only: give a smaller --batch or {flag}"
                )


def _reader(scripted: ScriptedSetup) -> DramReader:
    parts = scripted.parts
    layers = [] if parts.handoff is None else parts.handoff.layers
    if layers:
        return DramReader.of(layers, parts.workers, parts.plan.tier)
    return DramReader(parts.workers, parts.plan.tier)


def _config(request: ScriptedFlags, model: str, fmt: str, share: float) -> EngineConfig:
    length = request.context + request.tokens + request.widest + ROOM
    flags: dict[str, Any] = {"device": "cpu"}
    if Machine.detect().gpus:
        flags = {
            "device": "cuda", "kt_gpu_experts_ratio": share, "kt_gpu_prefill_token_threshold": 0,
            "disable_expert_foresight": True, "disable_dynamic_expert_update": True,
        }  # fmt: skip
    return EngineConfig.from_keywords(
        model, kt_method=fmt, kt_cpuinfer=request.threads, kernel_tier=request.tier,
        max_running_requests=max(request.batches), max_total_tokens=(max(request.batches) + 1) * (length + ROOM),
        speculative_algorithm=request.algorithm, speculative_num_steps=request.widest, context_length=length, **flags,
    )  # fmt: skip


Bound = Callable[[Timed, float], float]
"""The least seconds of a step whose sequences have so many rows each."""


def _bounds(request: ScriptedFlags, scripted: ScriptedSetup, batch: int, fmt: str, ceilings: MemoryRates) -> Bound:
    """All bytes once: dense weights and experts, each from the memory where they are; both are read together."""
    model = scripted.parts.model_config
    nbytes, layers = expert_bytes(model, fmt), len(model.moe_layers)
    stored = stored_as(model, request.dense, experts_of(fmt))
    dense = gpu_step_bytes(model, stored, batch, request.context)

    def bound(timed: Timed, rows: float) -> float:
        used = scripted.routing.distinct(rows, batch) * layers
        if timed.cpu_experts is None:
            return (dense + used * nbytes) / ceilings.dram / 1e9
        gpu_experts = max(0.0, used - timed.cpu_experts)
        seconds = experts_seconds(timed.cpu_experts, gpu_experts, nbytes, ceilings.dram, ceilings.hbm)
        return dense / ceilings.hbm / 1e9 + seconds

    return bound


def _row(
    request: ScriptedFlags, scripted: ScriptedSetup, fmt: str, share: float, batch: int, drafts: ScriptedDrafts
) -> dict[str, Any]:
    model = scripted.parts.model_config
    return {
        "bench": "speculation", "config": request.config, "layers": len(model.layers), "format": format_name(fmt),
        "dense": request.dense, "algorithm": _ALGORITHMS[drafts.algorithm],
        "acceptance": drafts.acceptance, "overlap": request.overlap,
        "steps": drafts.most, "governor": drafts.governed, "batch": batch, "gpu_share": share,
        "context": request.context, "tokens": request.tokens, "draft_ms": round(drafts.seconds * 1e3, 4),
    }  # fmt: skip


def _figures(turns: Sequence[TimedPair], stats: SpeculationStats, bound: Bound) -> dict[str, Any]:
    """share, plain_share: of the least time that reading the bytes once takes; width: draft tokens of a sequence in a
    step; right: of them."""
    width = stats.draft_tokens / max(1, sum(stats.widths))
    speculative, plain = [turn.speculative for turn in turns], [turn.plain for turn in turns]

    def median(values: Iterator[float], digits: int) -> float:
        return round(statistics.median(values), digits)

    return {
        "tok_s": median((t.tok_s for t in speculative), 2),
        "plain_tok_s": median((t.tok_s for t in plain), 2),
        "ratio": median((t.speculative.tok_s / t.plain.tok_s for t in turns), 4),
        "step_ms": median((t.step_seconds * 1e3 for t in speculative), 3),
        "plain_step_ms": median((t.step_seconds * 1e3 for t in plain), 3),
        "share": median((bound(t, 1.0 + width) / t.step_seconds for t in speculative), 4),
        "plain_share": median((bound(t, 1.0) / t.step_seconds for t in plain), 4),
        "width": round(width, 3), "right": round(stats.accepted_tokens / max(1, stats.draft_tokens), 3),
        "cpu_experts": round(statistics.median(t.cpu_experts or 0.0 for t in speculative), 1),
        "plain_cpu_experts": round(statistics.median(t.cpu_experts or 0.0 for t in plain), 1),
    }  # fmt: skip


def _stamp(request: ScriptedFlags) -> dict[str, Any]:
    return stamp(machine_name(Machine.detect(), request.threads))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    ratios = Table(title="Decoding with draft tokens, beside decoding without, in turn")
    for name in (
        "config", "GPU share", "batch", "acceptance", "draft tokens", "a step", "tokens/s", "plain", "ratio", "share",
    ):  # fmt: skip
        ratios.add_column(name, justify="right")
    for r in rows:
        most = f"up to {r['steps']}" if r["governor"] else f"always {r['steps']}"
        ratios.add_row(
            r["config"], f"{r['gpu_share']:.0%}", str(r["batch"]), f"{r['acceptance']:g}", most, f"{r['width']:.2f}",
            f"{r['tok_s']:.1f}", f"{r['plain_tok_s']:.1f}", f"{r['ratio']:.3f}", f"{r['share']:.0%}",
        )  # fmt: skip
    return ratios
