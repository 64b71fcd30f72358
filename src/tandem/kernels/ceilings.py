"""What this machine can do at best: DRAM read bandwidth and multiply-adds in registers, with our own threads.

Every kernel's time is compared with `Ceilings.bound_seconds`: the roofline model (Williams, Waterman and Patterson,
2009) with both roofs measured in the same run. A ceiling is the best of some repeats,
a kernel's time the median of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem import _core

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHE_BYTES = 32 << 20  # where the kernel does not say


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one tier and one set of threads."""

    read_gbps: float  # DRAM, GB/s
    flops: float  # bf16 multiply-add the tier's best way (f32 for f32 weights), operations per second

    def bound_seconds(self, bytes_read: float, operations: float) -> float:
        """No kernel that reads so much and computes so much can be faster."""
        return max(bytes_read / (self.read_gbps * 1e9), operations / self.flops)

    def is_memory_bound(self, bytes_read: float, operations: float) -> bool:
        return bytes_read / (self.read_gbps * 1e9) >= operations / self.flops


def last_level_cache_bytes(caches: Path = _CACHES) -> int:
    """Size of the largest cache that CPU 0 sees."""
    sizes = [_parse_size(path.read_text()) for path in caches.glob("index*/size")]
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def _parse_size(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    text = text.strip()
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)


def repeat_seconds(call: Callable[[], object], min_seconds: float = 0.2, min_repeats: int = 5) -> list[float]:
    """Wall times of repeated calls, after one that warms up."""
    call()
    times: list[float] = []
    while len(times) < min_repeats or sum(times) < min_seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def measure_read_gbps(pool: _core.WorkerPool, tier: str, buffer_bytes: int | None = None) -> float:
    """GB/s of reading a buffer of four times the last-level cache (so that none of it is still cached)."""
    size = buffer_bytes or 4 * last_level_cache_bytes()
    data = torch.full((size // 4,), 1.0)  # written, or every page would be the same page of zeros
    dense = _core.DenseOps(pool, tier)
    return size / min(repeat_seconds(lambda: dense.read_memory(data))) / 1e9


def measure_flops(pool: _core.WorkerPool, tier: str, bf16: bool = True) -> float:
    """Multiply-add operations per second, in registers, counted as two each."""
    dense, rounds = _core.DenseOps(pool, tier), 100_000
    operations = dense.multiply_add(rounds, bf16)
    return operations / min(repeat_seconds(lambda: dense.multiply_add(rounds, bf16)))


def measure_ceilings(pool: _core.WorkerPool, tier: str, buffer_bytes: int | None = None) -> Ceilings:
    return Ceilings(measure_read_gbps(pool, tier, buffer_bytes), measure_flops(pool, tier))
