"""Which CPUs compute, and which part of the weights each of them reads: `ThreadPlan`."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Core, Machine, cpu_list_text


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """cpus: the logical CPU of each pool thread, -1: not pinned. parts: which part of the weights each reads, from 0,
    ascending; (): they are not divided. part_nodes: the NUMA node whose memory a part is in; (): any. notice: about a
    division that was asked for and is not possible here; "": none."""

    cpus: tuple[int, ...]
    parts: tuple[int, ...]
    part_nodes: tuple[int, ...]
    reason: str
    notice: str = ""


def plan_threads(config: EngineConfig, machine: Machine) -> ThreadPlan:
    """One thread per usable core unless flags say less. Raises ConfigError for nodes that are not there."""
    nodes = _nodes(config, machine)
    usable = machine.spread(len(machine.cores), nodes)
    limit = min(machine.max_threads, len(usable))
    threads = config.kt_cpuinfer
    cores = machine.spread(limit if threads is None else min(threads, limit), nodes)
    cpus = machine.pinned(cores)
    (parts, part_nodes), notice = _parts(config.kt_threadpool_count, machine, cores)
    reason = f"{_reason(machine, threads, limit, cpus)}{_division(parts)}"
    return ThreadPlan(cpus, parts, part_nodes, reason, notice)


def _nodes(config: EngineConfig, machine: Machine) -> tuple[int, ...]:
    if config.kt_numa_nodes is None:
        return machine.nodes
    missing = set(config.kt_numa_nodes) - set(machine.nodes)
    if missing:
        here = ", ".join(map(str, machine.nodes))
        raise ConfigError(
            f"--kt-numa-nodes: node {min(missing)} has no core this process may use; these have: {here}",
            fields=("kt_numa_nodes",),
        )
    return tuple(sorted(set(config.kt_numa_nodes)))


_Parts = tuple[tuple[int, ...], tuple[int, ...]]  # parts, part_nodes


def _parts(count: int | None, machine: Machine, cores: tuple[Core, ...]) -> tuple[_Parts, str]:
    """And a notice where as many parts as asked for are not possible: the number that other machines want does no
    harm on this one."""
    nodes = machine.memory_nodes(cores)
    by_node = tuple(nodes.index(core.node) for core in cores) if nodes else ()
    if count == 1:
        return ((), ()), ""
    if count in (None, len(nodes)):
        return (by_node, nodes), ""
    assert count is not None
    here = {core.node for core in cores}
    if len(here) > 1 or count > len(cores):
        return (by_node, nodes), _not_divided_so(count, machine, cores, nodes)
    return (tuple(i * count // len(cores) for i in range(len(cores))), ()), ""  # one node: to try it out


def _not_divided_so(count: int, machine: Machine, cores: tuple[Core, ...], nodes: tuple[int, ...]) -> str:
    here = {core.node for core in cores}
    prefix = f"--kt-threadpool-count {count} changes nothing: "
    if nodes:
        return f"{prefix}weights are divided among the {len(nodes)} NUMA nodes of the threads' cores"
    if len(here) > 1:
        return f"{prefix}under the CPU quota threads are not pinned to NUMA nodes, so weights are not divided"
    return f"{prefix}there are only {len(cores)} threads on one NUMA node, so weights are not divided"


def _reason(machine: Machine, threads: int | None, limit: int, cpus: tuple[int, ...]) -> str:
    room = f"{limit} physical cores may be used"
    if machine.cpu_quota is not None and machine.max_threads < len(machine.cores):
        room = f"the control group's quota is {machine.cpu_quota:g} CPUs"
    pinned = "not pinned" if -1 in cpus else f"pinned to CPUs {cpu_list_text(cpus)}"
    if threads is None:
        return f"{room}; {pinned}"
    more = f"--kt-cpuinfer {threads}" + (f", but {room}" if threads > limit else "")
    return f"{more}; {pinned}"


def _division(parts: tuple[int, ...]) -> str:
    return f"; weights in {parts[-1] + 1} parts, each read by its own threads" if parts else ""
