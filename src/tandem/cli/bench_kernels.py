"""`kt bench kernels`: this machine's ceilings, then every format, tier and number of tokens against them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from tandem import __version__, _core
from tandem.cli.bench_experts import (
    BITS_PER_WEIGHT,
    Result,
    Shape,
    Workload,
    packed_layers,
    parse_shape,
    time_layers,
    torch_layers,
)
from tandem.cli.bench_plot import draw_roofline
from tandem.config.machine import Machine
from tandem.errors import ConfigError
from tandem.kernels.ceilings import Ceilings, last_level_cache_bytes, measure_ceilings

MEMORY_SHARE = 0.25  # of the available memory that one set of layers may take


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What the flags asked for, checked."""

    shapes: tuple[Shape, ...]
    formats: tuple[str, ...]
    tiers: tuple[str, ...]
    tokens: tuple[int, ...]
    with_torch: bool
    min_seconds: float  # of measuring per row
    working_set: int  # bytes of distinct weights at least


def run(
    *,
    shapes: list[str],
    formats: list[str],
    tiers: list[str],
    tokens: list[int],
    threads: int | None,
    with_torch: bool,
    seconds: float,
    working_set_mib: int | None,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Checks the flags, measures, prints, and writes what was asked for. No tiers: the best of this machine."""
    machine = Machine.detect()
    request = Request(
        tuple(map(parse_shape, shapes)),
        one_of("--format", formats, tuple(BITS_PER_WEIGHT)),
        one_of("--tier", tiers or [machine.tiers[-1]], machine.tiers),
        tuple(tokens),
        with_torch,
        seconds,
        4 * last_level_cache_bytes() if working_set_mib is None else working_set_mib << 20,
    )
    pool = make_pool(machine, threads)
    ceilings, results = measure(request, pool, machine.available_memory)
    console = Console()
    console.print(ceilings_table(ceilings, len(pool)), results_table(results))
    if out is not None:
        write_json(out, ceilings, results, machine, len(pool))
        console.print(f"Written to {out}")
    if plot is not None:
        draw_roofline(plot, ceilings, results)
        console.print(f"Drawn in {plot}")


def make_pool(machine: Machine, threads: int | None) -> _core.WorkerPool:
    count = threads or machine.max_threads
    if count > len(machine.cores):
        raise ConfigError(f"--threads {count}: this process may use {len(machine.cores)} physical cores")
    return _core.WorkerPool(list(machine.pinned(machine.spread(count, machine.nodes))))


def one_of(flag: str, values: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in known:
            raise ConfigError(f"{flag} {value}: this machine and build have {', '.join(known)}")
    return tuple(values)


def measure(
    request: Request, pool: _core.WorkerPool, available_memory: int
) -> tuple[dict[str, Ceilings], list[Result]]:
    """All rows, with a progress line for each. PyTorch gets as many threads as the pool has."""
    torch.set_num_threads(len(pool))
    results: list[Result] = []
    columns = (SpinnerColumn(), "{task.description}", TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring this machine's ceilings")
        ceilings = {tier: measure_ceilings(pool, tier, request.working_set) for tier in request.tiers}
        for step, rows in _measurements(request, pool, ceilings, available_memory):
            progress.update(task, description=step)
            results.extend(rows)
    return ceilings, results


def _measurements(
    request: Request, pool: _core.WorkerPool, ceilings: dict[str, Ceilings], available_memory: int
) -> Iterator[tuple[str, Iterator[Result]]]:
    """(what is being measured, its rows); the rows are measured when they are taken."""
    for full_shape in request.shapes:
        for fmt in request.formats:
            shape, count = fit(full_shape, fmt, request.working_set, available_memory)
            for tier in request.tiers:
                step = f"{shape.name} {fmt} {tier}"
                yield step, _packed_results(request, shape, fmt, tier, pool, count, ceilings[tier])
        if request.with_torch:
            shape, count = fit(full_shape, "bf16", request.working_set, available_memory)
            best = ceilings[request.tiers[-1]]
            yield f"{shape.name} with PyTorch", _torch_results(request, shape, count, best)


def fit(shape: Shape, fmt: str, working_set: int, available_memory: int) -> tuple[Shape, int]:
    """The shape with as many experts as fit in memory, and how many layers make up the working set."""
    budget = max(working_set, int(available_memory * MEMORY_SHARE))
    if shape.top_k * shape.expert_bytes(fmt) > available_memory * MEMORY_SHARE:
        raise ConfigError(
            f"--shape {shape.name}: {shape.top_k} experts need {shape.top_k * shape.expert_bytes(fmt) / 1e9:.1f} GB, "
            f"a quarter of the free memory is {available_memory * MEMORY_SHARE / 1e9:.1f} GB; choose a smaller shape"
        )
    shape = shape.limited_to(max(shape.top_k, int(budget / shape.expert_bytes(fmt))))
    return shape, max(2, -int(-working_set // (shape.experts * shape.expert_bytes(fmt))))


def _packed_results(
    request: Request,
    shape: Shape,
    fmt: str,
    tier: str,
    pool: _core.WorkerPool,
    count: int,
    ceilings: Ceilings,
) -> Iterator[Result]:
    layers = packed_layers(shape, fmt, tier, pool, count)
    for tokens in request.tokens:
        work = Workload(shape, tokens)
        seconds = time_layers(layers, work, request.min_seconds)
        yield work.result("tandem", fmt, tier, seconds, ceilings)


def _torch_results(request: Request, shape: Shape, count: int, ceilings: Ceilings) -> Iterator[Result]:
    for way, layers in torch_layers(shape, count).items():
        for tokens in request.tokens:
            work = Workload(shape, tokens)
            seconds = time_layers(layers, work, request.min_seconds)
            yield work.result(way, "bf16", "torch", seconds, ceilings)


def ceilings_table(ceilings: dict[str, Ceilings], threads: int) -> Table:
    table = Table(
        "tier", "DRAM read GB/s", "bf16 TFLOPS", title=f"Ceilings of this machine, {threads} threads"
    )
    for tier, each in ceilings.items():
        table.add_row(tier, f"{each.read_gbps:.1f}", f"{each.flops / 1e12:.3f}")
    return table


def results_table(results: list[Result]) -> Table:
    table = Table(title="One MoE layer's experts; share = of the least possible time", box=box.SIMPLE_HEAD)
    for name in ("bench", "shape", "format", "tier"):
        table.add_column(name)
    for name in ("tokens", "ms", "rate / ceiling", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        rate = f"{r.value:.3g}/{r.ceiling:.3g} {r.unit}"
        numbers = (str(r.tokens), f"{r.ms:.3g}", rate, f"{r.share:.0%}")
        table.add_row(r.bench, r.shape, r.format, r.tier, *numbers)
    return table


def write_json(
    path: Path, ceilings: dict[str, Ceilings], results: list[Result], machine: Machine, threads: int
) -> None:
    """{machine, threads, commit, version, torch, command, date, ceilings by tier, rows}."""
    report: dict[str, Any] = {
        "machine": machine.cpu_model,
        "threads": threads,
        "commit": commit(),
        "version": __version__,
        "torch": torch.__version__,
        "command": " ".join(["kt", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ceilings": {tier: dataclasses.asdict(each) for tier, each in ceilings.items()},
        "rows": [dataclasses.asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def commit() -> str | None:
    """The commit of the checkout this runs from; None when installed."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
