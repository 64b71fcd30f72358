"""`kt doctor`: what this machine has, how fast it is, what is wrong, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import typer

from tandem.cli import doctor_checks as checks
from tandem.cli import doctor_container as container
from tandem.cli import doctor_gpus as gpus
from tandem.cli.doctor_checks import Finding
from tandem.cli.doctor_tables import tables
from tandem.machine.machine import Machine


def doctor() -> None:
    """Show what this machine has, how fast it is, what is wrong, and the command that mends it. Takes some seconds.

    Example: kt doctor
    """
    from rich.console import Console

    with Console(stderr=True).status("looking at this machine, and measuring its memory …"):
        findings = list(_findings())
    show(findings)
    raise typer.Exit(0 if checks.kernels_are_built() else 1)


def _findings() -> Iterator[Finding]:
    machine = Machine.detect()
    yield from checks.software(machine)
    yield from checks.hardware(machine)
    yield from gpus.several_gpus(machine)
    yield from checks.settings(machine)
    yield from container.limits(machine)
    yield from _measured(machine)
    yield from checks.storage()
    yield from tables()
    yield from checks.network()


def _measured(machine: Machine) -> Iterator[Finding]:
    """Now, with one thread on each core that this process may use, and the GPU that would be used."""
    if not checks.kernels_are_built():
        return
    from tandem._core import supported_tiers
    from tandem.bench import probes

    usable = machine.limited_to(supported_tiers())
    gpu = probes.gpu_speeds() if machine.gpus and not machine.gpu_missing else None
    speeds = probes.with_gpu_speeds(probes.cpu_speeds(usable, usable.tiers[-1]), gpu)
    yield from checks.speeds_found(usable, speeds, 0.0 if gpu is None else gpu.from_gpu_gbps)


def show(checks: Iterable[Finding]) -> None:
    """A line for each, then each problem with its command."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table, console = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False), Console()
    findings = list(checks)
    for finding in findings:
        mark = Text("!", style="bold yellow") if finding.fix else Text("✓", style="green")
        table.add_row(mark, Text(finding.name, style="bold"), Text(finding.value))
    console.print(table)
    for finding in (one for one in findings if one.fix):
        text = f"\n! {finding.name}: {finding.fix}\n    {finding.command}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
