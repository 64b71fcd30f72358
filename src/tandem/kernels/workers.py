"""Worker pools as a plan or a machine wants them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tandem._core import WorkerPool
from tandem.machine.machine import Machine
from tandem.planner.choices.threads import ThreadPlan
from tandem.planner.plan import Plan


def planned_pool(plan: Plan | ThreadPlan) -> WorkerPool:
    """One worker per thread of the plan."""
    return WorkerPool(list(plan.cpus), nodes=list(plan.parts), memory_nodes=list(plan.part_nodes))


def machine_pool(machine: Machine, count: int) -> WorkerPool:
    """`count` workers, on as many cores of each NUMA node as possible."""
    cores = machine.spread(count, machine.nodes)
    nodes = machine.memory_nodes(cores)
    parts = [nodes.index(core.node) for core in cores] if nodes else []
    return WorkerPool(list(machine.pinned(cores)), nodes=parts, memory_nodes=list(nodes))


@contextmanager
def caller_on(cpu: int) -> Iterator[None]:
    """The calling thread has worker 0's CPU meanwhile, as the engine's thread has in the server (-1: any CPU)."""
    before = os.sched_getaffinity(0)
    if cpu >= 0:
        os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
