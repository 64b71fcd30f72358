"""What plans are predicted from: how the memory's speed is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, machine
from tandem.bench import probes
from tandem.config.machine import Core


@pytest.mark.parametrize(
    ("threads", "free", "expected"), [(2, 64 * GIB, GIB // 2), (16, 64 * GIB, 2 * GIB), (16, 4 * GIB, GIB)]
)
def test_every_thread_reads_more_than_caches_hold(
    monkeypatch: pytest.MonkeyPatch, threads: int, free: int, expected: int
) -> None:
    """And a quarter of the free memory at most."""
    seen: list[int] = []

    class Reader:
        def __init__(self, _pool: object, _tier: str, nbytes: int) -> None:
            seen.append(nbytes)

        def mean_gbps(self, _seconds: float) -> float:
            return 50.04

    monkeypatch.setattr(probes, "DramReader", Reader)
    monkeypatch.setattr(probes, "machine_pool", lambda _machine, _threads: None)
    monkeypatch.setattr(probes, "measure_flops", lambda *_args, **_more: 1e12)
    cores = tuple(Core(cpu, 0, 0) for cpu in range(threads))
    host = replace(machine(), cores=cores, available_memory=free, cpu_quota=None)
    found = probes.cpu_speeds(host, "avx2")
    assert seen == [expected] and (found.dram_gbps, found.cpu_flops) == (50.0, 1e12)
    assert set(found.sources.values()) == {"measured"}
