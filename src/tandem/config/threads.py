"""Which CPUs compute, and which part of the weights each of them reads: `Threads`."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.engine_config import EngineConfig
from tandem.config.machine import Core, Machine, cpu_list_text
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Threads:
    """cpus: the logical CPU of each pool thread, -1: not pinned. parts: which part of the weights each reads, from 0,
    ascending; (): they are not divided. part_nodes: the NUMA node whose memory a part is in; (): any."""

    cpus: tuple[int, ...]
    parts: tuple[int, ...]
    part_nodes: tuple[int, ...]
    reason: str


def plan_threads(config: EngineConfig, machine: Machine) -> Threads:
    """One thread per usable core unless flags say less. Raises ConfigError."""
    nodes = _nodes(config, machine)
    usable = machine.spread(len(machine.cores), nodes)
    limit = min(machine.max_threads, len(usable))
    asked = config.kt_cpuinfer
    cores = machine.spread(limit if asked is None else min(asked, limit), nodes)
    cpus = machine.pinned(cores)
    parts, part_nodes = _parts(config, machine, cores)
    reason = f"{_reason(machine, asked, limit, cpus)}{_division(parts)}"
    return Threads(cpus, parts, part_nodes, reason)


def _nodes(config: EngineConfig, machine: Machine) -> tuple[int, ...]:
    if config.kt_numa_nodes is None:
        return machine.nodes
    missing = set(config.kt_numa_nodes) - set(machine.nodes)
    if missing:
        here = ", ".join(map(str, machine.nodes))
        raise ConfigError(
            f"--kt-numa-nodes: node {min(missing)} has no core this process may use; these have: {here}"
        )
    return tuple(sorted(set(config.kt_numa_nodes)))


def _parts(
    config: EngineConfig, machine: Machine, cores: tuple[Core, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    nodes, asked = machine.memory_nodes(cores), config.kt_threadpool_count
    if asked == 1 or (asked is None and not nodes):
        return (), ()
    if asked in (None, len(nodes)):
        return tuple(nodes.index(core.node) for core in cores), nodes
    here = {core.node for core in cores}
    if len(here) > 1 or asked is None:
        raise ConfigError(
            f"--kt-threadpool-count {asked}: the threads' cores are on NUMA nodes {cpu_list_text(here)}"
            f"{'' if nodes else ', but under the CPU quota threads are not pinned to them'}; "
            "leave the flag out, or take 1: weights are not divided then"
        )
    if asked > len(cores):
        raise ConfigError(f"--kt-threadpool-count {asked}: there are only {len(cores)} threads")
    return tuple(i * asked // len(cores) for i in range(len(cores))), ()  # one node: to try it out


def _reason(machine: Machine, asked: int | None, limit: int, cpus: tuple[int, ...]) -> str:
    room = f"{limit} physical cores may be used"
    if machine.cpu_quota is not None and machine.max_threads < len(machine.cores):
        room = f"the control group's quota is {machine.cpu_quota:g} CPUs"
    pinned = "not pinned" if -1 in cpus else f"pinned to CPUs {cpu_list_text(cpus)}"
    if asked is None:
        return f"{room}; {pinned}"
    more = f"--kt-cpuinfer {asked}" + (f", but {room}" if asked > limit else "")
    return f"{more}; {pinned}"


def _division(parts: tuple[int, ...]) -> str:
    return f"; weights in {parts[-1] + 1} parts, each read by its own threads" if parts else ""
