"""Ceilings of this machine: DRAM read bandwidth and multiply-adds in registers, with our own threads.

Every kernel's time is compared with `Ceilings.bound_seconds`: the roofline model (Williams, Waterman and Patterson,
2009) with both roofs measured beside it. A ceiling is the best of its repeats, a kernel's time the median of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch

from tandem import _core
from tandem.kernels.packed.experts import PackedExperts
from tandem.machine.machine import Machine

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MIN_BURST_SECONDS = 5e-3
INT8_ACTIVATIONS = "int8 x int8"  # a kind of multiply-adds, beside those of formats
DEFAULT_CACHE_BYTES = 32 << 20  # where the kernel does not say
DRAM_BYTES = 2 << 30  # at least: a virtual machine may see a part of its host's cache only


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Roofs of one kernel tier with one set of threads."""

    read_gbps: float  # DRAM, GB/s
    flops: float  # multiply-adds in the compute type that the tier uses for a format, operations per second

    def bound_seconds(self, bytes_read: float, operations: float) -> float:
        """The least that reading so much and computing so much takes at these rates."""
        return max(bytes_read / (self.read_gbps * 1e9), operations / self.flops)

    def mean(self, other: Ceilings) -> Ceilings:
        return Ceilings((self.read_gbps + other.read_gbps) / 2, (self.flops + other.flops) / 2)

    def is_memory_bound(self, bytes_read: float, operations: float) -> bool:
        return bytes_read / (self.read_gbps * 1e9) >= operations / self.flops


def last_level_cache_bytes(caches: Path = _CACHES) -> int:
    """Size of the largest cache that CPU 0 sees."""
    sizes = [_parse_size(path.read_text()) for path in caches.glob("index*/size")]
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def beyond_caches_bytes() -> int:
    """So much memory that reading it anew reads DRAM: several times the last-level cache. A cache that does not replace
    in order keeps a share of what is read over and over. 0.25 of the free memory at most."""
    nbytes = max(8 * last_level_cache_bytes(), DRAM_BYTES)
    return min(nbytes, Machine.detect().available_memory // 4)


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


class DramReader:
    """All workers read memory that no cache keeps: a buffer of their own, or experts where they lie.

    The latter is what computing those experts can reach. A virtual machine does not know whether memory is near its
    cores: 110 and 160 GB/s, from one buffer to the next.
    """

    def __init__(self, pool: _core.WorkerPool, tier: str, buffer_bytes: int | None = None) -> None:
        """A buffer of its own; default: `beyond_caches_bytes`."""
        data = torch.empty((buffer_bytes or beyond_caches_bytes()) // 4)
        dense = _core.DenseOps(pool, tier)
        # or every page would be the same page of zeros
        dense.fill_memory(data, 1.0)
        self._parts = cycle([_TimedRead(data.nbytes, partial(dense.read_memory, data))])

    @classmethod
    def of(cls, layers: Sequence[PackedExperts], pool: _core.WorkerPool, tier: str) -> DramReader:
        """Reads what these layers lie in, some GiB at a time, one part after the other."""
        reader, dense = cls.__new__(cls), _core.DenseOps(pool, tier)
        reader._parts = cycle([_part_of(batch, dense) for batch in _batched(layers, beyond_caches_bytes())])
        return reader

    def gbps(self, min_seconds: float = 0.2, min_repeats: int = 5) -> float:
        """The best of several readings."""
        return (
            max(reading.nbytes / reading.seconds for reading in self._readings(min_seconds, min_repeats))
            / 1e9
        )

    def mean_gbps(self, min_seconds: float = 0.1) -> float:
        """Mean GB/s of all readings together: what something else that lasts as long can have."""
        readings = self._readings(min_seconds, 1)
        return sum(each.nbytes for each in readings) / sum(each.seconds for each in readings) / 1e9

    def _readings(self, min_seconds: float, min_repeats: int) -> list[_ReadTime]:
        readings, started = list[_ReadTime](), time.perf_counter()
        while len(readings) < min_repeats or time.perf_counter() - started < min_seconds:
            part, start = next(self._parts), time.perf_counter()
            part.read()
            readings.append(_ReadTime(part.nbytes, time.perf_counter() - start))
        return readings


class _TimedRead(NamedTuple):
    nbytes: int
    read: Callable[[], object]


class _ReadTime(NamedTuple):
    nbytes: int
    seconds: float


def _part_of(layers: Sequence[PackedExperts], dense: _core.DenseOps) -> _TimedRead:
    of_node = [list(ranges) for ranges in zip(*(layer.all_cpu_slots() for layer in layers), strict=True)]
    nbytes = sum(each.bytes for ranges in of_node for each in ranges)
    return _TimedRead(nbytes, partial(dense.read_ranges, of_node))


def _batched(layers: Sequence[PackedExperts], size: int) -> Iterator[list[PackedExperts]]:
    """Neighbours of `size` bytes together; the last ones may be fewer."""
    batch, total = list[PackedExperts](), 0
    for layer in layers:
        batch.append(layer)
        total += layer.bytes_per_expert * layer.loaded
        if total >= size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def measure_read_gbps(
    pool: _core.WorkerPool, tier: str, buffer_bytes: int | None = None, min_seconds: float = 0.2
) -> float:
    return DramReader(pool, tier, buffer_bytes).gbps(min_seconds)


def measure_flops(pool: _core.WorkerPool, tier: str, fmt: str = "bf16", min_seconds: float = 0.2) -> float:
    """Operations per second of all workers, each at its own pace; a multiply-add counts as two. Operands are in
    registers (AMX: in L1), in the compute type that the tier uses for weights of `fmt`. A call takes some milliseconds,
    so that its start does not count."""
    return max(_flops_readings(pool, tier, fmt, min_seconds))


def typical_flops(pool: _core.WorkerPool, tier: str, min_seconds: float = 0.2) -> float:
    """The median instead of the best: what products that last as long can have. In bf16."""
    return statistics.median(_flops_readings(pool, tier, "bf16", min_seconds))


def _flops_readings(pool: _core.WorkerPool, tier: str, fmt: str, min_seconds: float) -> list[float]:
    workspace = _core.Workspace(pool, tier)
    kind = ("int8", True) if fmt == INT8_ACTIVATIONS else (fmt, False)
    rounds = _burst_rounds(workspace, *kind)
    operations = workspace.multiply_add(rounds, *kind)
    times = repeat_seconds(lambda: workspace.multiply_add(rounds, *kind), min_seconds)
    return [operations / seconds for seconds in times]


def _burst_rounds(workspace: _core.Workspace, fmt: str, int8_activations: bool) -> int:
    """So many that they take MIN_BURST_SECONDS."""
    rounds, seconds = 1000, 0.0
    while seconds < MIN_BURST_SECONDS:
        rounds *= 4
        start = time.perf_counter()
        workspace.multiply_add(rounds, fmt, int8_activations)
        seconds = time.perf_counter() - start
    return rounds


@dataclass(slots=True)
class Roofs:
    """The ceilings of a run: each the best that was seen, so measure before and after what they are compared with."""

    reads: dict[int, float] = field(default_factory=dict)  # threads -> DRAM read, GB/s
    peaks: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # (tier, f32, bf16 or INT8_ACTIVATIONS) -> operations per second

    def measure_reads(self, pools: list[_core.WorkerPool], tier: str, size: int, min_seconds: float) -> None:
        for pool in pools:
            gbps = measure_read_gbps(pool, tier, size, min_seconds)
            self.reads[len(pool)] = max(gbps, self.reads.get(len(pool), 0.0))

    def measure_peak(self, pool: _core.WorkerPool, tier: str, fmt: str, min_seconds: float) -> None:
        key = tier, peak_format(fmt)
        self.peaks[key] = max(measure_flops(pool, *key, min_seconds), self.peaks.get(key, 0.0))

    def of(self, tier: str, fmt: str) -> Ceilings:
        """The bandwidth is the best of all numbers of threads."""
        return Ceilings(max(self.reads.values()), self.peaks[tier, peak_format(fmt)])

    def by_name(self) -> dict[str, Ceilings]:
        """All, by tier and, for integers, the kind."""
        kinds = {f"{tier}, {kind}" if kind == INT8_ACTIVATIONS else tier: kind for tier, kind in self.peaks}
        return {name: self.of(name.partition(",")[0], kind) for name, kind in kinds.items()}


def peak_format(fmt: str) -> str:
    """The format that stands for `fmt` in what bounds its arithmetic: all but f32 are multiplied as bf16."""
    return fmt if fmt in ("f32", INT8_ACTIVATIONS) else "bf16"
