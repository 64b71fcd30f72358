"""How fast this machine is: a few seconds of reading, multiplying and copying. What plans are predicted from, and what
`kt doctor` shows.

A machine that others share is not at its best all the time, and no model that runs on it is. So means and medians
count here, never the best.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NamedTuple

import torch

from tandem import _core
from tandem.bench.attention_flops import attention_flops
from tandem.bench.ceilings import DramReader, typical_flops
from tandem.kernels.workers import machine_pool
from tandem.machine.machine import Machine
from tandem.planner.forecast.speeds import MEASURED, Speeds

QUICK_BYTES = 512 << 20  # at least: a virtual machine does not see all of its host's cache
THREAD_BYTES = 128 << 20  # of the buffer, for each thread, which fills its own part
QUICK_SECONDS = 0.15
COPY_BYTES = 256 << 20
MATRIX = 4096
KERNELS = 200  # in a chain


class GpuSpeeds(NamedTuple):
    """GB/s of GPU memory (read and written), of pinned copies there and back; bf16 operations per second; seconds of a
    small kernel inside and outside of a CUDA graph."""

    gbps: float
    to_gpu_gbps: float
    from_gpu_gbps: float
    flops: float
    kernel_seconds: float
    launch_seconds: float


class MachineProbe:
    """This machine's speeds, which what others do on it changes within seconds. So they are read again beside what is
    measured, where its memory lies; the median of those readings counts."""

    def __init__(self, machine: Machine) -> None:
        """Reads each once: a second."""
        speeds = cpu_speeds(machine, machine.tiers[-1])
        self._first = with_gpu_speeds(speeds, gpu_speeds() if machine.gpus else None)
        self._read: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """By their names in `Speeds`."""
        for name, value in figures.items():
            self._read.setdefault(name, []).append(value)

    def speeds(self) -> Speeds:
        return self._first.having(MEASURED, **{name: statistics.median(each) for name, each in self._read.items()})


def read_beside(
    pool: _core.WorkerPool, tier: str, reader: DramReader | None, bus: Callable[[], float] | None
) -> dict[str, float]:
    """While a model is loaded: what takes no memory to speak of. reader: of what the CPU reads; bus: GB/s of copies to
    the GPU; None where there is nothing to read or to copy."""
    figures = _compute_flops(pool, tier)
    if reader is not None:
        figures["dram_gbps"] = reader.mean_gbps(QUICK_SECONDS)
    if bus is not None:
        figures["pcie_gbps"] = bus()
    if torch.cuda.is_available():
        device = torch.device("cuda")
        figures |= {"kernel_seconds": _graph_seconds(device), "launch_seconds": _eager_seconds(device)}
    return figures


def cpu_speeds(machine: Machine, tier: str) -> Speeds:
    """All threads that this process may use. tier: of `this_machine().tiers`."""
    pool = machine_pool(machine, machine.max_threads)
    dram = buffer_reader(machine, pool, tier).mean_gbps(QUICK_SECONDS)
    return Speeds().having(MEASURED, dram_gbps=round(dram, 1), **_compute_flops(pool, tier))


def _compute_flops(pool: _core.WorkerPool, tier: str) -> dict[str, float]:
    """Operations per second, by their names in `Speeds`."""
    products = typical_flops(pool, tier, QUICK_SECONDS)
    return {"cpu_flops": products, "cpu_attention_flops": attention_flops(pool, tier, QUICK_SECONDS / 3)}


def buffer_reader(machine: Machine, pool: _core.WorkerPool, tier: str) -> DramReader:
    """A reader of memory of its own: a buffer no larger than a quarter of what is free."""
    nbytes = max(QUICK_BYTES, THREAD_BYTES * machine.max_threads)
    return DramReader(pool, tier, min(nbytes, machine.available_memory // 4))


def with_gpu_speeds(speeds: Speeds, gpu: GpuSpeeds | None) -> Speeds:
    if gpu is None:
        return speeds
    return speeds.having(
        MEASURED, gpu_gbps=gpu.gbps, gpu_flops=gpu.flops, pcie_gbps=gpu.to_gpu_gbps,
        kernel_seconds=gpu.kernel_seconds, launch_seconds=gpu.launch_seconds,
    )  # fmt: skip


def gpu_speeds(device: torch.device | None = None) -> GpuSpeeds | None:
    """Speeds of the GPU that PyTorch would use; None where it can use none."""
    if not torch.cuda.is_available():
        return None
    gpu = device or torch.device("cuda")
    with torch.cuda.device(gpu):
        to_gpu, from_gpu = _pinned_gbps(gpu)
        rates = _copy_gbps(gpu), to_gpu, from_gpu, _product_flops(gpu)
        speeds = GpuSpeeds(*rates, _graph_seconds(gpu), _eager_seconds(gpu))
        torch.cuda.empty_cache()
        return speeds


def _timed(call: Callable[[], object], repeats: int = 9) -> float:
    """Seconds: the median of some calls, after one that warms up."""
    call()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeats):
        started = perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(perf_counter() - started)
    return statistics.median(times)


def _copy_gbps(device: torch.device) -> float:
    source = torch.ones(4 * COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return round(2 * source.numel() / _timed(lambda: target.copy_(source)) / 1e9, 1)


def _pinned_gbps(device: torch.device) -> tuple[float, float]:
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    up = COPY_BYTES / _timed(lambda: target.copy_(host, non_blocking=True)) / 1e9
    return round(up, 1), round(COPY_BYTES / _timed(lambda: host.copy_(target, non_blocking=True)) / 1e9, 1)


def _product_flops(device: torch.device) -> float:
    a = torch.randn(MATRIX, MATRIX, device=device).bfloat16()
    return 2.0 * MATRIX**3 / _timed(lambda: a @ a)


def _graph_seconds(device: torch.device) -> float:
    """Seconds of a kernel in a CUDA graph that waits for the one before."""
    x, graph = torch.zeros(64, device=device), torch.cuda.CUDAGraph()
    x.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            x.add_(1)
    return _timed(graph.replay) / KERNELS


def _eager_seconds(device: torch.device) -> float:
    x = torch.zeros(64, device=device)

    def chain() -> None:
        for _ in range(KERNELS):
            x.add_(1)

    return _timed(chain) / KERNELS
