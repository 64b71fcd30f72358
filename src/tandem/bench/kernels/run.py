"""`kt bench kernels`: every format, tier and number of tokens against this machine's ceilings.

A row is measured in turns with the ceilings it is compared with: what a shared host gives changes within seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from tandem import __version__, _core
from tandem.bench import formats as bench_formats
from tandem.bench.ceilings import (
    INT8_ACTIVATIONS,
    Ceilings,
    DramReader,
    Roofs,
    beyond_caches_bytes,
    measure_flops,
    peak_format,
)
from tandem.bench.figures import check_matplotlib
from tandem.bench.kernels.experts import (
    ExpertShape,
    Layer,
    Result,
    Timing,
    Workload,
    packed_layers,
    parse_shape,
    run_in,
    time_layers,
    torch_layers,
)
from tandem.bench.kernels.explain import chosen, table
from tandem.bench.kernels.roofline import draw_roofline
from tandem.bench.rows import STAMP, keep, of_bench, stamp, write_json_file
from tandem.errors import ConfigError
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import machine_pool
from tandem.machine.machine import Machine

OURS, A8 = "tandem", "tandem A8"  # A8: with int8 activations
CEILING_SECONDS = 0.5  # of measuring per ceiling, before the rows and again after them
TURNS = 3  # of a row; its ceilings are read before and after each
TURN_CEILING_SECONDS = 0.04
INTERRUPTED = 130  # the exit status, as of a shell after SIGINT
MEMORY_SHARE = 0.25  # of the available memory that one set of layers may take


@dataclasses.dataclass(frozen=True, slots=True)
class KernelFlags:
    """The flags of a run, checked."""

    shapes: tuple[ExpertShape, ...]
    formats: tuple[str, ...]
    tiers: tuple[str, ...]
    tokens: tuple[int, ...]
    with_torch: bool
    int8_activations: bool  # beside the usual ones
    min_seconds: float  # of measuring per row
    working_set: int  # bytes of distinct weights at least


@dataclasses.dataclass(frozen=True, slots=True)
class TypedFlags:
    """The flags as they are. No tiers: the best of this machine."""

    shapes: list[str]
    formats: list[str]
    tiers: list[str]
    tokens: list[int]
    with_torch: bool
    int8_activations: bool
    seconds: float
    working_set_mib: int | None

    def checked(self, machine: Machine) -> KernelFlags:
        """Raises ConfigError."""
        request = KernelFlags(
            tuple(map(parse_shape, self.shapes)),
            one_of("--format", self.formats, bench_formats.FORMATS),
            one_of("--tier", self.tiers or [machine.tiers[-1]], machine.tiers),
            tuple(self.tokens),
            self.with_torch,
            self.int8_activations,
            self.seconds,
            beyond_caches_bytes() if self.working_set_mib is None else self.working_set_mib << 20,
        )
        if self.int8_activations and set(request.formats) <= set(bench_formats.NO_INTEGERS):
            raise ConfigError("--int8-activations: no --format given has integer codes; add int8 or int4")
        return request


def run(request: TypedFlags, threads: int | None, out: Path | None, plot: Path | None) -> None:
    """Checks the flags, measures, prints, and writes what was asked for."""
    if plot is not None:
        check_matplotlib()
    machine = this_machine()
    bench = Bench(request.checked(machine), machine, pools_of(machine, threads))
    results = bench.run()
    console = Console()
    if out is not None:  # first: what is printed to may be gone after Ctrl-C
        write_json(out, bench, results)
    console.print(ceilings_table(bench.roofs), *result_tables(results))
    if out is not None:
        console.print(f"Written to {out}")
    if plot is not None:
        draw_roofline(plot, bench.roofs.by_name(), results)
        console.print(f"Drawn in {plot}")
    if bench.interrupted:
        console.print(
            "Interrupted: these are the rows measured until then; not all ceilings were read again after them"
        )
        raise typer.Exit(INTERRUPTED)


def explain(*, shapes: list[str], formats: list[str], tiers: list[str], tokens: list[int]) -> None:
    """Prints which kernels the flags' rows run on. No tiers: all of this machine."""
    machine, console = this_machine(), Console()
    names = one_of("--format", formats, bench_formats.FORMATS)
    places = one_of("--tier", tiers or list(machine.tiers), machine.tiers)
    for shape in map(parse_shape, shapes):
        console.print(table(shape, (row for name in names for row in chosen(shape, name, places, tokens))))


def pools_of(machine: Machine, threads: int | None) -> list[_core.WorkerPool]:
    """Pools of one, half of, and all of the threads."""
    count = threads or machine.max_threads
    if count > len(machine.cores):
        raise ConfigError(f"--threads {count}: this process may use {len(machine.cores)} physical cores")
    counts = sorted({1, max(1, count // 2), count})
    return [machine_pool(machine, n) for n in counts]


def one_of(flag: str, values: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in known:
            raise ConfigError(f"{flag} {value}: this machine and build have {', '.join(known)}")
    return tuple(values)


class Bench:
    """One run: the ceilings, all rows, each in turns with its own ceilings, and the ceilings again."""

    def __init__(self, request: KernelFlags, machine: Machine, pools: list[_core.WorkerPool]) -> None:
        self.request, self.machine, self.pools, self.pool = request, machine, pools, pools[-1]
        self.best_tier = machine.tiers[-1]  # PyTorch may use anything that this machine has
        self.roofs = Roofs()
        self.interrupted = False

    def run(self) -> list[Result]:
        """All rows, with a progress line for each; after Ctrl-C those that are whole, if there are any.

        PyTorch gets as many threads as the pool has.
        """
        torch.set_num_threads(len(self.pool))
        steps = list(self._measurements())  # a shape that does not fit is refused before anything is measured
        timings: list[Timing] = []
        columns = (SpinnerColumn(), "{task.description}", TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("measuring this machine's ceilings")
            self.measure_roofs()
            try:
                for step, rows in steps:
                    progress.update(task, description=step)
                    timings.extend(rows)  # keeps those before an interrupted one
                progress.update(task, description="the ceilings again")
                self.measure_roofs()
            except KeyboardInterrupt:
                if not timings:
                    raise
                self.interrupted = True
        return [timing.result() for timing in timings]

    def measure_roofs(self) -> None:
        request, best = self.request, self.best_tier
        seconds = min(CEILING_SECONDS, request.min_seconds)
        self.roofs.measure_reads(self.pools, best, request.working_set, seconds)
        peaks = {(tier, fmt) for tier in request.tiers for fmt in request.formats}
        if request.with_torch:
            peaks.add((best, "bf16"))
        if request.int8_activations:
            peaks |= {(tier, kind) for tier in request.tiers for kind in ("bf16", INT8_ACTIVATIONS)}
        for tier, fmt in sorted(peaks):
            self.roofs.measure_peak(self.pool, tier, fmt, seconds)

    def _measurements(self) -> Iterator[tuple[str, Iterator[Timing]]]:
        """(what is being measured, its rows); the rows are measured when they are taken."""
        request, available = self.request, self.machine.available_memory
        for full_shape in request.shapes:
            for fmt in request.formats:
                shape, count = fit(full_shape, fmt, request.working_set, available)
                for tier in request.tiers:
                    yield f"{shape.name} {fmt} {tier}", self._packed(OURS, shape, fmt, tier, count)
                    if request.int8_activations and fmt not in bench_formats.NO_INTEGERS:
                        yield f"{shape.name} {fmt} {tier} A8", self._packed(A8, shape, fmt, tier, count)
            if request.with_torch:
                shape, count = fit(full_shape, "bf16", request.working_set, available)
                yield f"{shape.name} with PyTorch", self._torch(shape, count)

    def _packed(self, bench: str, shape: ExpertShape, fmt: str, tier: str, count: int) -> Iterator[Timing]:
        layers = packed_layers(shape, fmt, tier, self.pool, count, int8_activations=bench == A8)
        calls: list[Layer] = [layer.forward for layer in layers]
        reader = DramReader.of(layers, self.pool, self.best_tier)
        for tokens in self.request.tokens:
            yield self._row(bench, Workload(shape, tokens), fmt, tier, calls, reader)

    def _torch(self, shape: ExpertShape, count: int) -> Iterator[Timing]:
        reader = DramReader(self.pool, self.best_tier, self.request.working_set)
        for way, layers in torch_layers(shape, count).items():
            for tokens in self.request.tokens:
                yield self._row(way, Workload(shape, tokens), "bf16", "torch", layers, reader)

    def _row(
        self, bench: str, work: Workload, fmt: str, tier: str, layers: list[Layer], reader: DramReader
    ) -> Timing:
        kinds = [fmt] if bench != A8 else ["bf16", INT8_ACTIVATIONS]  # on AMX many rows are not rounded
        peaks_of = self.best_tier if tier == "torch" else tier
        run_in(layers, work)
        turns, before = [], self._ceilings_now(peaks_of, kinds, reader)
        for _ in range(TURNS):
            seconds = time_layers(layers, work, self.request.min_seconds / TURNS)
            after = self._ceilings_now(peaks_of, kinds, reader)
            turns.append((seconds, before.mean(after)))
            before = after
        return Timing(bench, work, fmt, tier, tuple(turns))

    def _ceilings_now(self, tier: str, kinds: list[str], reader: DramReader) -> Ceilings:
        seconds = min(TURN_CEILING_SECONDS, self.request.min_seconds)
        peaks = [measure_flops(self.pool, tier, peak_format(kind), seconds) for kind in kinds]
        return Ceilings(reader.gbps(seconds, min_repeats=2), max(peaks))


def fit(shape: ExpertShape, fmt: str, working_set: int, available_memory: int) -> tuple[ExpertShape, int]:
    """The shape with as many experts as fit in memory, and how many layers make up the working set."""
    budget = max(working_set, int(available_memory * MEMORY_SHARE))
    if shape.top_k * shape.expert_bytes(fmt) > available_memory * MEMORY_SHARE:
        raise ConfigError(
            f"--shape {shape.name}: {shape.top_k} experts need {shape.top_k * shape.expert_bytes(fmt) / 1e9:.1f} GB, "
            f"a quarter of the free memory is {available_memory * MEMORY_SHARE / 1e9:.1f} GB; choose a smaller shape"
        )
    shape = shape.limited_to(max(shape.top_k, int(budget / shape.expert_bytes(fmt))))
    return shape, max(2, -int(-working_set // (shape.experts * shape.expert_bytes(fmt))))


def ceilings_table(roofs: Roofs) -> Table:
    table = Table(title="Ceilings, the best of those before and after all rows", box=box.SIMPLE_HEAD)
    table.add_column("what")
    for name in ("threads", "rate"):
        table.add_column(name, justify="right")
    for threads, gbps in roofs.reads.items():
        table.add_row("DRAM read", str(threads), f"{gbps:.1f} GB/s")
    for (tier, fmt), flops in roofs.peaks.items():
        table.add_row(f"{tier}, {fmt}", str(max(roofs.reads)), f"{flops / 1e12:.3f} TFLOPS")
    return table


SHORT_NAMES = {"torch grouped_mm": "torch grouped"}


def result_tables(results: list[Result]) -> Iterator[Table]:
    """One per shape, at most 80 columns wide."""
    for shape, rows in groupby(results, key=lambda r: r.shape):
        title = f"Experts of one MoE layer, {shape}; share = of the least possible time"
        table = Table(title=title, box=box.SIMPLE_HEAD)
        for name in ("kernels", "format"):
            table.add_column(name, no_wrap=True)
        for name in ("tokens", "ms", "rate / ceiling", "share"):
            table.add_column(name, justify="right", no_wrap=True)
        for r in rows:
            rate = f"{short(r.value)}/{short(r.ceiling)} {r.unit}"
            name = f"ours {r.tier}" if r.bench in (OURS, A8) else SHORT_NAMES.get(r.bench, r.bench)
            fmt = f"{r.format} A8" if r.bench == A8 else r.format
            table.add_row(name, fmt, str(r.tokens), short(r.ms), rate, f"{r.share:.0%}")
        yield table


def short(value: float) -> str:
    """Three digits, or more before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def write_json(path: Path, bench: Bench, results: list[Result]) -> None:
    """{machine, threads, commit, version, torch, command, date, interrupted, ceilings, rows}."""
    report: dict[str, Any] = {
        **stamp(bench.machine.cpu_model),
        "threads": len(bench.pool),
        "version": __version__,
        "torch": torch.__version__,
        "interrupted": bench.interrupted,
        "ceilings": ceiling_rows(bench.roofs),
        "rows": [dataclasses.asdict(result) for result in results],
    }
    if path.is_dir():
        run = {name: report[name] for name in STAMP}
        run["machine"] += f", {report['threads']} threads"  # as other benches' rows name it
        keep([of_bench("kernels", row | run) for row in report["rows"]], path)
    else:
        write_json_file(report, path)


def ceiling_rows(roofs: Roofs) -> list[dict[str, Any]]:
    """{what, threads, gbps} for DRAM, {what, tier, format, threads, tflops} for arithmetic."""
    reads = [{"what": "DRAM read", "threads": n, "gbps": gbps} for n, gbps in roofs.reads.items()]
    peaks = [
        {"what": "peak", "tier": tier, "format": fmt, "threads": max(roofs.reads), "tflops": flops / 1e12}
        for (tier, fmt), flops in roofs.peaks.items()
    ]
    return reads + peaks
