"""`Machine` over made-up /proc and /sys trees: cores, NUMA, control groups, instruction sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem import _core
from tandem.kernels.this_machine import this_machine
from tandem.machine.machine import (
    TIERS,
    Core,
    Machine,
    cpu_list_text,
    parse_cpu_list,
    tiers_of,
)

GIB = 1 << 30
AVX2 = "fpu sse2 avx avx2 fma f16c bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"
AVX512_BF16 = f"{AVX512} avx512_vnni avx512_bf16 avx512vbmi"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_tree(root: Path, sockets: int = 1, cores: int = 2, threads: int = 1, flags: str = AVX2) -> Path:
    """A machine of `sockets` = NUMA nodes; sibling threads are numbered after all cores, as Linux does."""
    total = sockets * cores
    write(
        root / "proc/cpuinfo", f"processor: 0\nmodel name\t: Test CPU\nflags\t\t: {flags}\n\nprocessor: 1\n"
    )
    write(root / "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n")
    for cpu in range(total * threads):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(topology / "physical_package_id", str(cpu % total // cores))
        write(topology / "core_id", str(cpu % cores))
    for node in range(sockets):
        ranges = [
            f"{t * total + node * cores}-{t * total + node * cores + cores - 1}" for t in range(threads)
        ]
        write(root / f"sys/devices/system/node/node{node}/cpulist", ",".join(ranges) + "\n")
    return root


def test_one_cpu_per_physical_core_sorted_by_node(tmp_path: Path) -> None:
    machine = Machine.detect(make_tree(tmp_path, sockets=2, cores=4, threads=2), affinity=range(16))
    assert [c.cpu for c in machine.cores] == list(range(8))
    assert (machine.nodes, machine.sockets, machine.max_threads) == ((0, 1), 2, 8)
    assert machine.cpu_model == "Test CPU"
    assert (machine.total_memory, machine.available_memory) == (16 * GIB, 12 * GIB)


def test_affinity_counts_a_core_whose_first_thread_is_forbidden(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, sockets=1, cores=4, threads=2)
    assert [c.cpu for c in Machine.detect(tree, affinity=[1, 5, 6]).cores] == [1, 6]


def test_missing_topology_counts_each_cpu(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", "processor: 0\n")
    write(tmp_path / "proc/meminfo", "MemTotal: 100 kB\nMemFree: 50 kB\n")
    machine = Machine.detect(tmp_path, affinity=[0, 1, 2])
    assert (len(machine.cores), machine.tiers, machine.available_memory) == (3, ("scalar",), 50 << 10)


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)])
def test_cgroup_v2_quota(tmp_path: Path, quota: str, threads: int) -> None:
    tree = make_tree(tmp_path, cores=4)
    write(tree / "proc/self/cgroup", "0::/a/b\n")
    write(tree / "sys/fs/cgroup/a/cpu.max", quota)  # set on the parent: it holds for the child
    write(tree / "sys/fs/cgroup/a/b/cpu.max", "max 100000")
    assert Machine.detect(tree, affinity=range(4)).max_threads == threads


def test_cgroup_v2_memory_counts_file_cache_as_free(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    write(tree / "proc/self/cgroup", "0::/\n")
    write(tree / "sys/fs/cgroup/memory.max", str(8 * GIB))
    write(tree / "sys/fs/cgroup/memory.current", str(5 * GIB))
    write(tree / "sys/fs/cgroup/memory.stat", f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\n")
    machine = Machine.detect(tree, affinity=[0])
    assert (machine.total_memory, machine.available_memory) == (8 * GIB, 6 * GIB)


def test_cgroup_v1_limits(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, cores=4)
    write(tree / "proc/self/cgroup", "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n")
    memory = tree / "sys/fs/cgroup/memory"  # the container sees its own group as the mount's root
    write(memory / "memory.limit_in_bytes", str(4 * GIB))
    write(memory / "memory.usage_in_bytes", str(GIB))
    write(tree / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000")
    write(tree / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "50000")
    machine = Machine.detect(tree, affinity=range(4))
    assert (machine.max_threads, machine.total_memory, machine.available_memory) == (3, 4 * GIB, 3 * GIB)


def test_cgroup_v1_without_limits(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, cores=4)
    write(tree / "proc/self/cgroup", "4:memory:/\n1:cpu:/\n")
    write(tree / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    write(tree / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(tree / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    machine = Machine.detect(tree, affinity=range(4))
    assert (machine.max_threads, machine.total_memory, machine.cpu_quota) == (4, 16 * GIB, None)


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("fpu sse2", "scalar"),
        (AVX2, "avx2"),
        (AVX512, "avx512"),
        (AVX512_BF16, "avx512_bf16"),
        (f"{AVX512_BF16} amx_tile amx_bf16 amx_int8", "avx512_bf16"),
        (f"{AVX512_BF16} avx512_fp16 amx_tile amx_bf16 amx_int8", "amx"),
        ("avx512f avx512bw avx512vl avx512dq", "scalar"),  # no tier without the ones below it
    ],
)
def test_tiers(flags: str, best: str) -> None:
    tiers = tiers_of(flags.split())
    assert tiers[-1] == best
    assert tiers == TIERS[: len(tiers)]


def test_spread_takes_from_every_node() -> None:
    cores = tuple(Core(cpu, cpu // 4, cpu // 4) for cpu in range(8))
    machine = Machine("Test CPU", cores, ("scalar",), GIB, GIB)
    assert [c.cpu for c in machine.spread(3, (0, 1))] == [0, 1, 4]
    assert [c.cpu for c in machine.spread(9, (1,))] == [4, 5, 6, 7]


def test_kernel_lists() -> None:
    assert parse_cpu_list("0-2,8,10-11\n") == [0, 1, 2, 8, 10, 11]
    assert parse_cpu_list("\n") == []
    assert cpu_list_text([11, 0, 1, 2, 8, 10]) == "0-2,8,10-11"


def test_tiers_that_a_process_may_not_use_are_left_out() -> None:
    """AMX is in /proc/cpuinfo, but a sandbox refuses tile registers: the next best tier is planned."""
    machine = Machine("Test CPU", (Core(0, 0, 0),), TIERS, GIB, GIB)
    assert machine.limited_to(("scalar", "avx2", "avx512", "avx512_bf16")).tiers == TIERS[:-1]
    assert machine.limited_to((*TIERS, "another")) == machine
    assert set(this_machine().tiers) <= set(_core.supported_tiers())


def test_this_machine_is_plausible() -> None:
    machine = Machine.detect()
    assert 1 <= machine.max_threads <= len(os.sched_getaffinity(0))
    assert {c.cpu for c in machine.cores} <= os.sched_getaffinity(0)
    assert 0 < machine.available_memory <= machine.total_memory
