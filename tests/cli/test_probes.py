"""What plans are predicted from: how the memory's speed is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plans import GIB, machine
from tandem._core import WorkerPool, supported_tiers
from tandem.bench import probes
from tandem.bench.attention_flops import attention_flops
from tandem.bench.ceilings import DramReader, measure_flops
from tandem.machine.machine import Core
from tandem.planner.forecast.speeds import Speeds


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
    monkeypatch.setattr(probes, "typical_flops", lambda *_args: 1e12)
    monkeypatch.setattr(probes, "attention_flops", lambda *_args: 3e11)
    cores = tuple(Core(cpu, 0, 0) for cpu in range(threads))
    host = replace(machine(), cores=cores, available_memory=free, cpu_quota=None)
    found = probes.cpu_speeds(host, "avx2")
    assert seen == [expected] and (found.dram_gbps, found.cpu_flops) == (50.0, 1e12)
    assert found.cpu_attention_flops == 3e11
    assert set(found.sources.values()) == {"measured"}


def probe(monkeypatch: pytest.MonkeyPatch) -> probes.MachineProbe:
    """Of a machine that reads 100 GB/s and has no GPU."""
    first = Speeds().having("measured", dram_gbps=100.0, cpu_flops=1e12)
    monkeypatch.setattr(probes, "cpu_speeds", lambda _machine, _tier: first)
    return probes.MachineProbe(machine())


def test_the_median_of_what_was_read_beside_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first reading, which was elsewhere in memory, does not."""
    found = probe(monkeypatch)
    for gbps in (82.0, 120.0, 103.0):
        found.add({"dram_gbps": gbps})
    assert (found.speeds().dram_gbps, found.speeds().cpu_flops) == (103.0, 1e12)
    assert found.speeds().sources == {"dram_gbps": "measured", "cpu_flops": "measured"}


def test_a_machine_whose_model_was_not_measured_is_as_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(monkeypatch).speeds().dram_gbps == 100.0


def test_only_what_is_there_is_read_beside_a_model() -> None:
    pool = WorkerPool([-1])
    alone = probes.read_beside(pool, "scalar", None, None)
    reader = DramReader(pool, "scalar", 1 << 20)
    both = probes.read_beside(pool, "scalar", reader, lambda: 55.0)
    expected = {"cpu_flops", "cpu_attention_flops"}
    expected |= {"kernel_seconds", "launch_seconds"} if torch.cuda.is_available() else set()
    assert set(alone) == expected and set(both) == expected | {"dram_gbps", "pcie_gbps"}
    assert both["pcie_gbps"] == 55.0 and all(value > 0 for value in both.values())


@pytest.mark.parametrize("tier", supported_tiers())
def test_attention_reads_below_the_products_of_its_tier(tier: str) -> None:
    """It is computed in float32, whatever products are computed in."""
    pool = WorkerPool([-1])
    attention = min(attention_flops(pool, tier, 0.01) for _ in range(3))  # other processes come and go
    assert 0 < attention < max(measure_flops(pool, tier, "bf16", 0.01) for _ in range(3))
