"""`kt doctor`: what this machine has, what is missing, and the fix for each."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer

from tandem.cli.version import installed_version
from tandem.config import Machine
from tandem.config.memory import gib

DEMO_BYTES = 1 << 30  # weights, the base file and what lies beside them while building
LOW_BANDWIDTH = 15.0  # GB/s; one channel of old memory
SUPPORTED_PYTHON = ((3, 11), (3, 13))


class Finding(NamedTuple):
    """One line of the report. `fix` is empty when all is well."""

    name: str
    value: str
    fix: str = ""


def doctor() -> None:
    """What this machine has, what is missing, and how to fix it. Takes a few seconds: it measures memory speed.

    Example: kt doctor
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    machine = Machine.detect()
    found = [*software(), *hardware(machine), *measured(machine), *storage(Path.home())]
    for finding in found:
        mark = Text("!", style="bold yellow") if finding.fix else Text("✓", style="green")
        table.add_row(mark, Text(finding.name, style="bold"), Text(finding.value))
    console = Console()
    console.print(table)
    for finding in found:
        if finding.fix:
            console.print(f"\n! {finding.name}: {finding.fix}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if kernels_are_built() else 1)


def software() -> Iterator[Finding]:
    """Python, torch and our kernels."""
    here, (oldest, newest) = sys.version_info[:2], SUPPORTED_PYTHON
    fits = oldest <= here <= newest
    yield Finding("Python", ".".join(map(str, here)), "" if fits else "use Python 3.11, 3.12 or 3.13")
    torch = installed_version("torch")
    fits = torch.startswith("2.") and int(torch.split(".")[1]) >= 11
    yield Finding("torch", torch, "" if fits else 'pip install "torch>=2.11,<3"')
    built = kernels_are_built()
    yield Finding("kernels", "built" if built else "missing", "" if built else "pip install . (or: make ext)")


def kernels_are_built() -> bool:
    return importlib.util.find_spec("tandem._core") is not None


def hardware(machine: Machine) -> Iterator[Finding]:
    """What `Machine` knows."""
    yield Finding("CPU", machine.cpu_model)
    yield _threads(machine)
    yield _tiers(machine)
    yield Finding("NUMA", f"{_count(len(machine.nodes), 'node')}, {_count(machine.sockets, 'socket')}")
    yield _memory(machine)
    yield from _gpus(machine)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _threads(machine: Machine) -> Finding:
    cores = f"{len(machine.cores)} physical cores may be used"
    if machine.cpu_quota is None or machine.max_threads == len(machine.cores):
        return Finding("cores", cores)
    value = f"{machine.max_threads} of {cores}: the control group's quota is {machine.cpu_quota:g} CPUs"
    return Finding("cores", value, "raise the container's CPU limit (docker run --cpus …) if that is too few")


def _tiers(machine: Machine) -> Finding:
    fix = "without AVX2 everything works, but slowly; a CPU since 2013 or a VM that passes AVX2 on has it"
    return Finding("instruction sets", ", ".join(machine.tiers), fix if machine.tiers == ("scalar",) else "")


def _memory(machine: Machine) -> Finding:
    value = f"{gib(machine.available_memory)} free of {gib(machine.total_memory)}"
    enough = machine.available_memory >= 2 * DEMO_BYTES
    return Finding(
        "memory", value, "" if enough else "the demo needs 2 GiB: end other programs, or add memory"
    )


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("GPU", f"{machine.no_gpu}; everything runs on the CPU")
    for gpu in machine.gpus:
        free = f"{gib(gpu.free_bytes)} free of {gib(gpu.memory_bytes)}"
        yield Finding(f"GPU {gpu.number}", f"{gpu.name}, {free}, PCIe {gpu.pcie}")


def measured(machine: Machine) -> Iterator[Finding]:
    """Measured now, with one thread on each core that this process may use."""
    if not kernels_are_built():
        return
    from tandem.bench.ceilings import measure_ceilings
    from tandem.kernels.this_machine import this_machine
    from tandem.kernels.workers import machine_pool

    pool = machine_pool(machine, machine.max_threads)
    tier = this_machine().tiers[-1]
    ceilings = measure_ceilings(pool, tier)
    fix = "decoding is bound by it: fill all memory channels, and end other programs"
    low = ceilings.read_gbps < LOW_BANDWIDTH
    yield Finding(
        "memory speed", f"{ceilings.read_gbps:.1f} GB/s read, {len(pool)} threads", fix if low else ""
    )
    yield Finding("compute", f"{ceilings.flops / 1e9:.0f} GFLOP/s in bf16 with {tier}")


def storage(home: Path) -> Iterator[Finding]:
    """Where prepared models are kept."""
    from tandem.checkpoint import demo_dir

    if demo_dir().is_dir():
        yield Finding("demo model", str(demo_dir()))
        return
    parent = next(p for p in [*demo_dir().parents, home] if p.is_dir())
    free = shutil.disk_usage(parent).free
    fix = f"free some space below {parent}, or set TANDEM_CACHE_DIR" if free < 2 * DEMO_BYTES else ""
    yield Finding("demo model", f"not built yet (kt demo); {gib(free)} of disk are free", fix)
