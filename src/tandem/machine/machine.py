"""`Machine`: what this process may use of the machine it runs on. Detected from /proc and /sys, or built by hand."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

from tandem.flags.env import visible_gpus
from tandem.machine.cgroup import read_cgroup_limits
from tandem.machine.gpus import Gpu, GpuHolder, detect_gpus, emptiest_first
from tandem.machine.links import GpuLinks, gpu_links
from tandem.machine.numa_binding import mbind_error

_TIER_FEATURES = {
    "scalar": (),
    "avx2": ("avx2", "fma", "f16c", "bmi1", "bmi2"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512_bf16": ("avx512_vnni", "avx512_bf16", "avx512vbmi"),
    "amx": ("avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
}
"""Features that each kernel tier needs beyond the one before it, as in /proc/cpuinfo (CMakeLists.txt compiles them)."""

TIERS = tuple(_TIER_FEATURES)


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core that this process may use; `cpu` is its lowest usable logical CPU."""

    cpu: int
    node: int  # NUMA node
    socket: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes are bytes; `cores` is sorted by NUMA node. Nothing here is measured (`kt doctor` measures)."""

    cpu_model: str
    cores: tuple[Core, ...]
    tiers: tuple[str, ...]  # kernel tiers this CPU can run, slowest first
    total_memory: int  # of the machine, or the control group's limit if that is less
    available_memory: int  # what can be taken without swapping
    cpu_quota: float | None = None  # CPUs' worth of time of the control group; None: no limit
    gpus: tuple[Gpu, ...] = ()  # the one to take first
    links: GpuLinks = field(default_factory=GpuLinks)  # between them
    no_gpu: str = "no GPU was found"  # why, where there are none
    gpu_missing: tuple[str, ...] = ()  # packages that a GPU needs and that are not installed
    torch: str = ""  # its version; "": not known
    flashinfer: str = ""  # its version; "": not installed
    mbind_error: str = ""  # why memory cannot be bound to NUMA nodes; "": it can be
    limited_memory: bool = False  # by the control group, so that its free memory is not the machine's

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have usable cores."""
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def sockets(self) -> int:
        return len({core.socket for core in self.cores})

    @property
    def max_threads(self) -> int:
        """Threads that can compute at the same time: usable physical cores, or the quota if that is less."""
        if self.cpu_quota is None:
            return len(self.cores)
        return max(1, min(len(self.cores), int(self.cpu_quota)))

    def spread(self, count: int, nodes: Iterable[int]) -> tuple[Core, ...]:
        """`count` cores of these nodes, as many of each node as possible, sorted by node."""
        by_node = [[core for core in self.cores if core.node == node] for node in nodes]
        turns = [core for turn in zip_longest(*by_node) for core in turn if core is not None]
        return tuple(sorted(turns[:count], key=lambda core: (core.node, core.cpu)))

    def pinned(self, cores: Iterable[Core]) -> tuple[int, ...]:
        """The CPU that the thread of each core is pinned to, -1 for none.

        Under a CPU quota other groups run on the same cores. Pinned threads of two groups would fight for one core
        while others idle. So the kernel's scheduler is left to place the threads.
        """
        quota_rules = self.cpu_quota is not None and self.cpu_quota < len(self.cores)
        return tuple(-1 if quota_rules else core.cpu for core in cores)

    def memory_nodes(self, cores: tuple[Core, ...]) -> tuple[int, ...]:
        """The NUMA nodes of these cores, ascending; () if there is only one, or threads float and belong to none."""
        nodes = tuple(sorted({core.node for core in cores}))
        return nodes if len(nodes) > 1 and -1 not in self.pinned(cores) else ()

    def on_nodes(self, nodes: Iterable[int]) -> Machine:
        """Without the cores of other NUMA nodes."""
        return replace(self, cores=tuple(core for core in self.cores if core.node in set(nodes)))

    def of_rank(self, rank: int, ranks: int) -> Machine:
        """Equal part of the machine for one of several processes: cores side by side, and memory."""
        each = len(self.cores) // ranks
        return replace(
            self, cores=self.cores[rank * each : (rank + 1) * each], total_memory=self.total_memory // ranks,
            available_memory=self.available_memory // ranks,
            cpu_quota=None if self.cpu_quota is None else self.cpu_quota / ranks,
        )  # fmt: skip

    def limited_to(self, tiers: Iterable[str]) -> Machine:
        """Without the tiers that are not among these."""
        return replace(self, tiers=tuple(tier for tier in self.tiers if tier in set(tiers)))

    def with_gpus(self) -> Machine:
        """Asks nvidia-smi, which may take longer than everything else here."""
        gpus, no_gpu = detect_gpus()
        links = gpu_links() if len(gpus) > 1 else GpuLinks()
        return replace(self, gpus=gpus, no_gpu=no_gpu, links=links)

    def with_holders(self, holders: Mapping[str, GpuHolder], counted: bool) -> Machine:
        """holders: of GPUs, by UUID. Those come after emptier ones, unless CUDA_VISIBLE_DEVICES gives the order.
        counted: what they are about to take is not free."""
        gpus = tuple(replace(gpu, holder=holders.get(gpu.uuid)) for gpu in self.gpus)
        if visible_gpus() is None:
            gpus = emptiest_first(gpus)
        return replace(self, gpus=tuple(replace(gpu, free_bytes=gpu.room) for gpu in gpus) if counted else gpus)

    @classmethod
    def detect(cls, root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Machine:
        """This machine. `root` and `affinity` replace `/` and the process's CPU mask in tests."""
        machine = cls.detect_cpus(root, affinity)
        return machine.with_gpus() if root == Path("/") else machine

    @classmethod
    def detect_cpus(cls, root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Machine:
        """This machine, before its GPUs are looked for."""
        allowed = set(affinity if affinity is not None else os.sched_getaffinity(0))
        total, available = _memory(root)
        limits = read_cgroup_limits(root)
        cpuinfo = _cpuinfo(root)
        return cls(
            cpu_model=cpuinfo.get("model name", platform.machine()),
            cores=cores_of(root, allowed),
            tiers=tiers_of(cpuinfo.get("flags", "").split()),
            total_memory=_least(total, limits.memory_bytes),
            available_memory=_least(available, limits.memory_free_bytes),
            cpu_quota=limits.cpu_quota,
            gpu_missing=_missing_gpu_packages(),
            torch=_version("torch") or "",
            flashinfer=_version("flashinfer-python") or "",
            mbind_error=mbind_error(),
            limited_memory=limits.memory_bytes is not None and limits.memory_bytes < total,
        )


def tiers_of(features: Iterable[str]) -> tuple[str, ...]:
    """The kernel tiers that a CPU with these /proc/cpuinfo flags can run, slowest first."""
    present, tiers = set(features), []
    for tier, needed in _TIER_FEATURES.items():
        if not present.issuperset(needed):
            break  # each tier builds on the one before
        tiers.append(tier)
    return tuple(tiers)


def _least(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's entries."""
    fields: dict[str, str] = {}
    for line in (root / "proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields


def _memory(root: Path) -> tuple[int, int]:
    """MemTotal and MemAvailable of /proc/meminfo, bytes."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.split()[1:]}
    return kib["MemTotal"] << 10, kib.get("MemAvailable", kib["MemFree"]) << 10


def cores_of(root: Path, allowed: set[int]) -> tuple[Core, ...]:
    """One entry per physical core: hyper-threads of a core share its vector units, so only one computes."""
    nodes = _node_of_cpu(root)
    cores: dict[tuple[int, int, int], Core] = {}
    for cpu in sorted(allowed):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        socket = _int_file(topology / "physical_package_id", 0)
        key = (socket, _int_file(topology / "die_id", 0), _int_file(topology / "core_id", cpu))
        cores.setdefault(key, Core(cpu, nodes.get(cpu, 0), max(0, socket)))
    return tuple(sorted(cores.values(), key=lambda core: (core.node, core.cpu)))


def _node_of_cpu(root: Path) -> dict[int, int]:
    nodes: dict[int, int] = {}
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpu_list((directory / "cpulist").read_text())
        nodes.update(dict.fromkeys(cpus, int(directory.name.removeprefix("node"))))
    return nodes


def parse_cpu_list(text: str) -> list[int]:
    """The kernel's list format: "0-2,8" → [0, 1, 2, 8]."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def cpu_list_text(cpus: Iterable[int]) -> str:
    """The reverse: [0, 1, 2, 8] → "0-2,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _int_file(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


def _missing_gpu_packages() -> tuple[str, ...]:
    """Without importing any of them: torch takes seconds."""
    missing = [name for name in ("triton", "cuda-core") if _version(name) is None]
    if (_version("torch") or "+cpu").endswith("+cpu"):
        missing.insert(0, "PyTorch built for CUDA")
    return tuple(missing)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
