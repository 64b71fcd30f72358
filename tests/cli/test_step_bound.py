"""Bounds of decode steps, and the share of them that is reached."""

from __future__ import annotations

import pytest

from tandem.bench.step_bound import StepCeilings, TimedTokens, paired_share
from tandem.planner.forecast.bound import experts_seconds

GB = 10**9


def test_both_sides_are_read_at_the_same_time() -> None:
    assert experts_seconds(cpu_reads=6, gpu_reads=2, nbytes=GB, dram_gbps=100, gpu_gbps=4000) == pytest.approx(0.06)
    assert experts_seconds(cpu_reads=0, gpu_reads=2, nbytes=GB, dram_gbps=100, gpu_gbps=4000) == pytest.approx(
        0.0005
    )


def test_a_share_compares_what_was_measured_together() -> None:
    """Memory halves after a third of the repeats, and steps with it: medians of each alone would say 0.5 or 2."""
    assert paired_share(bounds=[1.0, 2.0, 2.0], times=[1.25, 2.5, 2.5]) == pytest.approx(0.8)
    with pytest.raises(ValueError):
        paired_share([1.0], [1.0, 2.0])


def test_a_rows_bound_is_the_step_without_experts_and_the_slower_sides_bytes() -> None:
    ceilings = StepCeilings(step_seconds=0.002, gpu_gbps=4000)
    fast = TimedTokens(tokens=10, used=4800, hits=480, seconds=0.125, dram_gbps=108)
    slow = TimedTokens(tokens=10, used=4800, hits=480, seconds=0.220, dram_gbps=54)
    assert ceilings.bound(fast, 10**6) == pytest.approx(0.002 + 432e6 / 108e9 / 1)
    row = ceilings.columns([fast, fast, slow], 10**6)
    assert row["bound_tok_s"] == pytest.approx(1 / 0.006, abs=0.01)
    assert row["share"] == pytest.approx(0.006 / 0.0125, abs=1e-4) and row["dram_gbps"] == 108
