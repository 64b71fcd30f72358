"""Worker pools as a plan or a machine wants them."""

from __future__ import annotations

from tandem._core import WorkerPool
from tandem.config.choices.threads import Threads
from tandem.config.machine import Machine
from tandem.config.plan import Plan


def planned_pool(plan: Plan | Threads) -> WorkerPool:
    """One worker per thread of the plan."""
    return WorkerPool(list(plan.cpus), nodes=list(plan.parts), memory_nodes=list(plan.part_nodes))


def machine_pool(machine: Machine, count: int) -> WorkerPool:
    """`count` workers, on as many cores of each NUMA node as possible."""
    cores = machine.spread(count, machine.nodes)
    nodes = machine.memory_nodes(cores)
    parts = [nodes.index(core.node) for core in cores] if nodes else []
    return WorkerPool(list(machine.pinned(cores)), nodes=parts, memory_nodes=list(nodes))
