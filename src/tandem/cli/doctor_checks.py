"""Checks of `kt doctor`: packages, hardware, settings, speeds, places. Each problem has its command."""

from __future__ import annotations

import importlib.util
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tandem.cli.version import installed_version
from tandem.machine.gpus import LEAST_CAPABILITY, Gpu, equals
from tandem.machine.machine import Machine
from tandem.planner.forecast.speeds import Speeds, gpu_model
from tandem.planner.memory import gib

DEMO_BYTES = 1 << 30  # weights, the base file and what lies beside them while building
LOW_BANDWIDTH = 15.0  # GB/s; one channel of old memory
SUPPORTED_PYTHON = ((3, 11), (3, 14))
OPEN_FILES = 1024  # large checkpoints have hundreds of files
DEFAULT_PORT = 30000
LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}  # of a PCIe generation's lane
GOOD_SHARE = 0.6  # of what a link or memory can do; less is a problem


class Finding(NamedTuple):
    """One line of the report. `fix` is empty when all is well; `command`: what to type."""

    name: str
    value: str
    fix: str = ""
    command: str = ""


def software(machine: Machine | None = None) -> Iterator[Finding]:
    """Python, torch, our kernels, and what a GPU needs beside them."""
    version, (oldest, newest) = sys.version_info[:2], SUPPORTED_PYTHON
    wrong = "" if oldest <= version <= newest else "Tandem runs on Python 3.11 to 3.14"
    command = "python3.13 -m venv .venv && .venv/bin/pip install tandem-moe" if wrong else ""
    yield Finding("Python", ".".join(map(str, version)), wrong, command)
    torch = installed_version("torch")
    fits = torch.startswith("2.") and int(torch.split(".")[1]) >= 11
    yield Finding(
        "torch",
        torch,
        "" if fits else "2.11 or newer is needed",
        "" if fits else 'pip install "torch>=2.11,<3"',
    )
    built = kernels_are_built()
    missing = (
        ("", "")
        if built
        else ("nothing can be computed without them", "pip install . (in the checkout: make ext)")
    )
    yield Finding("kernels", "built" if built else "missing", *missing)
    if machine is not None and machine.gpus:
        yield from _gpu_packages(machine)


def _gpu_packages(machine: Machine) -> Iterator[Finding]:
    commands = {
        "PyTorch built for CUDA": 'pip install --force-reinstall "torch>=2.11,<3"',
        "triton": 'pip install "triton>=3.4"', "cuda-core": 'pip install "cuda-core>=0.5"',
    }  # fmt: skip
    for name in machine.gpu_missing:
        why = (
            "CUDA graphs are off where experts are in CPU memory"
            if name == "cuda-core"
            else "the GPU is not used"
        )
        yield Finding(name, "missing", f"without it {why}", commands[name])
    if not machine.gpu_missing:
        yield Finding("GPU packages", "there")


def kernels_are_built() -> bool:
    return importlib.util.find_spec("tandem._core") is not None


def hardware(machine: Machine) -> Iterator[Finding]:
    """Findings about CPU, NUMA nodes, memory and GPUs, as `Machine` knows them."""
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
    fix = "raise the container's CPU limit if that is too few"
    return Finding("cores", value, fix, f"docker run --cpus {len(machine.cores)} …")


def _tiers(machine: Machine) -> Finding:
    slow = machine.tiers == ("scalar",)
    fix = "without AVX2 everything works, but slowly; a VM has to pass it on" if slow else ""
    return Finding("instruction sets", ", ".join(machine.tiers), fix, "qemu … -cpu host" if slow else "")


def _memory(machine: Machine) -> Finding:
    value = f"{gib(machine.available_memory)} free of {gib(machine.total_memory)}"
    if machine.available_memory >= 2 * DEMO_BYTES:
        return Finding("memory", value)
    return Finding(
        "memory",
        value,
        "the demo needs 2 GiB: end other programs, or add memory",
        "ps aux --sort=-rss | head",
    )


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("GPU", f"{machine.no_gpu}; everything runs on the CPU")
    for place, gpu in enumerate(machine.gpus):
        free = f"{gib(gpu.free_bytes)} free of {gib(gpu.memory_bytes)}"
        value = f"{gpu.name}, {free}, PCIe {gpu.pcie}"
        name = f"GPU {gpu.number}"
        if gpu.capability is not None and gpu.capability < LEAST_CAPABILITY:
            yield Finding(
                name,
                value,
                "too old for the kernels: Ampere or newer is needed",
                "kt serve MODEL --device cpu",
            )
        elif gpu.free_bytes < gpu.memory_bytes // 2:
            yield Finding(name, value, "other programs hold most of its memory", "nvidia-smi (then end them)")
        elif place:
            equal = sum(equals(gpu, other) for other in machine.gpus) > 1
            yield Finding(name, f"{value}; {'idle without --tp' if equal else 'not used: another kind than the first'}")
        else:
            yield Finding(name, value)


def settings(machine: Machine, root: Path = Path("/")) -> Iterator[Finding]:
    """Findings about settings of the system that make Tandem slow or stop it."""
    yield from _huge_pages(root)
    yield from _governor(root)
    if len(machine.nodes) > 1 and read_text(root / "proc/sys/kernel/numa_balancing") == "1":
        fix = "it moves pages that were placed on purpose"
        yield Finding("NUMA balancing", "on", fix, "sudo sysctl kernel.numa_balancing=0")
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < OPEN_FILES:
        fix = "a large checkpoint has hundreds of files, a server many connections"
        yield Finding("open files", f"at most {files}", fix, f"ulimit -n {min(hard, 65536)}")


def _huge_pages(root: Path) -> Iterator[Finding]:
    place = root / "sys/kernel/mm/transparent_hugepage/enabled"
    text = read_text(place)
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        fix = "weights are read faster from large pages"
        yield Finding(
            "large pages", chosen, fix, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
    elif chosen:
        yield Finding("large pages", chosen)


def _governor(root: Path) -> Iterator[Finding]:
    governor = read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    driver = read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver")
    if governor == "powersave" and "pstate" not in driver:  # pstate drivers' powersave is as fast
        yield Finding(
            "CPU frequency", governor, "cores stay slow", "sudo cpupower frequency-set -g performance"
        )


def read_text(path: Path) -> str:
    """Without white space around it; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def speeds_found(machine: Machine, speeds: Speeds, from_gpu_gbps: float = 0.0) -> Iterator[Finding]:
    """speeds: as measured a moment ago. from_gpu_gbps: pinned copies back."""
    low = speeds.dram_gbps < LOW_BANDWIDTH
    fix = "decoding is bound by it: fill all memory channels, and end other programs" if low else ""
    value = f"{speeds.dram_gbps:.1f} GB/s read, {_count(machine.max_threads, 'thread')}"
    yield Finding("memory speed", value, fix, "sudo dmidecode -t memory | grep -i speed" if low else "")
    yield Finding("compute", f"{speeds.cpu_flops / 1e9:.0f} GFLOP/s in bf16 with {machine.tiers[-1]}")
    if speeds.sources.get("gpu_gbps") != "measured":
        return
    gpu = machine.gpus[0]
    yield _gpu_memory(gpu, speeds)
    yield Finding("GPU compute", f"{speeds.gpu_flops / 1e12:.0f} TFLOPS in bf16")
    yield _pcie(gpu, speeds.pcie_gbps, from_gpu_gbps)


def _gpu_memory(gpu: Gpu, speeds: Speeds) -> Finding:
    model, value = gpu_model(gpu.name), f"{speeds.gpu_gbps:.0f} GB/s copied"
    if model is None or speeds.gpu_gbps >= GOOD_SHARE * model.gbps:
        return Finding("GPU memory", value)
    fix = f"the maker says {model.gbps:.0f}: other programs use it, or it is throttled"
    return Finding("GPU memory", value, fix, "nvidia-smi -q -d PERFORMANCE,CLOCK,UTILIZATION")


def _pcie(gpu: Gpu, up: float, down: float) -> Finding:
    value = f"{up:.1f} GB/s to the GPU" + (f", {down:.1f} back" if down else "") + f", pinned; {gpu.pcie}"
    link_rate = link_gbps(gpu.pcie)
    if not link_rate or up >= GOOD_SHARE * link_rate:
        return Finding("PCIe", value)
    fix = f"{gpu.pcie} could do {link_rate:.0f} GB/s: the slot or a riser may have fewer lanes"
    query = "pcie.link.gen.current,pcie.link.width.current"
    return Finding("PCIe", value, fix, f"nvidia-smi --query-gpu={query} --format=csv (while it is busy)")


def link_gbps(text: str) -> float:
    """GB/s of a PCIe link such as "gen5 x16"; 0 where it is not known."""
    words = text.replace("gen", "").split(" x")
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return 0.0
    return LANE_GBPS.get(int(words[0]), 0.0) * int(words[1])


def storage() -> Iterator[Finding]:
    """Where prepared and fetched models are kept."""
    from tandem.checkpoint import demo_dir
    from tandem.hub.snapshot import cache_root

    if demo_dir().is_dir():
        yield Finding("demo model", str(demo_dir()))
    else:
        free, parent = _free(demo_dir())
        fix = f"{gib(free)} are free below {parent}; it needs 2 GiB" if free < 2 * DEMO_BYTES else ""
        value = f"not built yet (kt demo); {gib(free)} of disk are free"
        yield Finding("demo model", value, fix, "export TANDEM_CACHE_DIR=/a/larger/disk" if fix else "")
    free, _ = _free(cache_root())
    yield Finding("hub's models", f"{cache_root()}; {gib(free)} of disk are free")


def _free(folder: Path) -> tuple[int, Path]:
    parent = next(path for path in (folder, *folder.parents) if path.is_dir())
    return shutil.disk_usage(parent).free, parent


def network() -> Iterator[Finding]:
    """Finding on the port where `kt serve` listens by default: free, or in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError:
            why = "another program has it; if that is kt serve, all is well"
            yield Finding(
                "port", f"{DEFAULT_PORT} is in use", why, f"kt serve MODEL --port {DEFAULT_PORT + 1}"
            )
        else:
            yield Finding("port", f"{DEFAULT_PORT} is free")
