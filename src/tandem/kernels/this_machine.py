"""`this_machine`: `Machine.detect`, with the kernel tiers that this very process can run."""

from __future__ import annotations

from collections.abc import Iterable

from tandem import _core
from tandem.machine.machine import Machine


def this_machine() -> Machine:
    """/proc/cpuinfo says what the CPU has. Tile registers (AMX) a process must ask for, too, and a sandbox or an old
    kernel may refuse them; the core has asked."""
    return these_cpus().with_gpus()


def these_cpus(affinity: Iterable[int] | None = None) -> Machine:
    """The same before its GPUs are looked for (`Machine.with_gpus`). affinity: logical CPUs; None: the calling
    thread's."""
    return Machine.detect_cpus(affinity=affinity).limited_to(_core.supported_tiers())
