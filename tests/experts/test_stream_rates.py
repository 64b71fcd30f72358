"""`StreamRates`: what is streamed to the GPU in a step, from what both ways take."""

from __future__ import annotations

import pytest

from tandem.planner.forecast.cpu_factors import FIRST_WAIT, MOST_WAIT, ONCE, SECOND_WAIT, CpuFactors
from tandem.planner.forecast.stream_rates import HOST_SECONDS, PART_SECONDS, TRIED, WHOLE, StreamRates
from tandem.spec.gpu_scratch import RING_BYTES, ring_of

H100 = {"bus": 6.2e-3, "cpu_fixed": 2.32e-3, "cpu_row": 1.036e-5}  # Qwen3-30B-A3B in int4, as measured


@pytest.mark.parametrize(
    ("rows", "least", "most"), [(16, 0.0, 0.0), (512, 0.6, WHOLE), (2048, 1.0, 1.0), (8192, 1.0, 1.0)]
)
def test_the_share_that_takes_both_equally_long(rows: int, least: float, most: float) -> None:
    rates = StreamRates(**H100)
    share = rates.share(rows)
    assert least <= share <= most
    if 0 < share < 1:
        assert share * rates.bus == pytest.approx(HOST_SECONDS + (1 - share) * rates.cpu_seconds(rows))


def test_a_step_streams_only_where_that_is_faster() -> None:
    slow, fast = StreamRates(**H100), StreamRates(bus=0.01, cpu_fixed=1e-4, cpu_row=1e-7)
    assert fast.share(1) == fast.share(1000) == 0.0 and fast.least(1000) == 0
    least = slow.least(8192)
    assert 64 < least <= 512 and slow.share(least) > 0 and slow.share(least // 2) == 0.0
    assert f"steps of {least} rows" in slow.text(8192) and "no step" in fast.text(1000)


@pytest.mark.parametrize("asked", [1, 100, 4096])
def test_a_threshold_that_was_asked_for(asked: int) -> None:
    """Streams from there on, faster or not; a CPU that is much slower is left out."""
    rates = StreamRates(**H100, least_rows=asked)
    assert rates.share(asked) > 0 and rates.share(asked - 1) == 0.0
    assert StreamRates(1e-3, 1.0, 0.0, asked).share(asked) == 1.0


def test_measured_times_correct_the_split() -> None:
    """A CPU that takes twice as long as at the start gets less, in steps of such a size, and of sizes that nobody has
    measured."""
    rates, fresh = StreamRates(0.02, 0.001, 1e-4), StreamRates(0.02, 0.001, 1e-4)
    for _ in range(20):
        share = rates.share(100)
        rates.observe(100, share, 2 * (0.001 + 100 * 1e-4) * (1 - share))
    assert rates.cpu_seconds(100) == pytest.approx(2 * fresh.cpu_seconds(100), rel=0.01)
    assert rates.share(100) > fresh.share(100)
    assert rates.cpu_seconds(1000) == pytest.approx(2 * fresh.cpu_seconds(1000), rel=0.01)
    assert rates.cpu_seconds(8) == fresh.cpu_seconds(8)  # so few rows use few experts
    for _ in range(20):
        rates.observe(1000, 0.5, 0.5 * fresh.cpu_seconds(1000))
    assert rates.cpu_seconds(1000) == pytest.approx(fresh.cpu_seconds(1000), rel=0.01)
    assert rates.cpu_seconds(100) == pytest.approx(2 * fresh.cpu_seconds(100), rel=0.01)
    assert 1.2 < rates.cpu_seconds(300) / fresh.cpu_seconds(300) < 1.8  # between both
    before = rates.share(100)
    rates.observe(100, 0.5, 0.0)  # nobody measured
    assert rates.share(100) == before


def test_one_wild_measurement_changes_little() -> None:
    rates = StreamRates(**H100)
    rates.observe(512, 0.5, 100.0)
    assert rates.cpu_seconds(512) <= 4 * StreamRates(**H100).cpu_seconds(512)
    assert rates.share(512) <= 1.0


def steps_left_out(rates: StreamRates, in_graphs: bool) -> int:
    """Until the CPU gets a part again."""
    steps = 0
    while rates.share(512, in_graphs) == 1.0 and steps < 500:
        rates.observe(512, 1.0, 0.0)
        steps += 1
    return steps


@pytest.mark.parametrize("in_graphs", [False, True])
def test_a_cpu_that_was_left_out_is_tried_again(in_graphs: bool) -> None:
    """After slow steps all experts are streamed. What made it slow may have passed: it gets a small part, more and more
    seldom while it stays slow."""
    rates = StreamRates(**H100)
    before = rates.share(512, in_graphs)
    while rates.share(512, in_graphs) < 1.0:
        rates.observe(512, rates.share(512, in_graphs), 10.0)
    waits = []
    for _ in range(7):
        waits.append(steps_left_out(rates, in_graphs))
        share = rates.share(512, in_graphs)
        assert before < share < 1.0 and 0 < rates.cpu_part(512, share) <= TRIED * rates.bus
        rates.observe(512, share, 10.0)
    assert waits == [FIRST_WAIT, SECOND_WAIT, 8, 16, MOST_WAIT, MOST_WAIT, MOST_WAIT]
    steps_left_out(rates, in_graphs)
    for _ in range(3):
        share = rates.share(512, in_graphs)
        rates.observe(512, share, StreamRates(**H100).cpu_part(512, share))
        steps_left_out(rates, in_graphs)
    assert rates.share(512, in_graphs) == pytest.approx(before, abs=0.03)


@pytest.mark.parametrize(("in_graphs", "wrong"), [(False, 3), (True, 5)])
def test_a_cpu_that_the_start_found_too_slow_is_tried_too(in_graphs: bool, wrong: int) -> None:
    slow = StreamRates(6.2e-3, *(wrong * H100[name] for name in ("cpu_fixed", "cpu_row")))
    assert slow.share(512, in_graphs) == 1.0
    assert steps_left_out(slow, in_graphs) == FIRST_WAIT
    share = slow.share(512, in_graphs)
    slow.observe(512, share, StreamRates(**H100).cpu_part(512, share))
    steps_left_out(slow, in_graphs)
    share = slow.share(512, in_graphs)
    slow.observe(512, share, StreamRates(**H100).cpu_part(512, share))
    assert slow.share(512, in_graphs) == pytest.approx(StreamRates(**H100).share(512, in_graphs), abs=0.05)


def test_a_cpu_that_would_have_no_part_if_it_were_much_faster_is_never_tried() -> None:
    rates = StreamRates(**H100)
    for _ in range(100):
        assert rates.share(1 << 15, in_graphs=True) == 1.0
        rates.observe(1 << 15, 1.0, 0.0)


def test_a_slow_step_counts_when_the_next_one_is_slow_too() -> None:
    """And a fast one at once: nobody is faster by chance."""
    factors = CpuFactors()
    factors.learn(512, 1.0)
    factors.learn(512, 3.0)
    assert factors.of(512) == pytest.approx(ONCE)
    factors.learn(512, 1.0)
    assert factors.of(512) < ONCE
    for ratio in (3.0, 4.0):
        factors.learn(512, ratio)
    assert factors.of(512) == 3.0
    factors.learn(512, 1.0)
    assert factors.of(512) == 2.0
    factors.learn(512, 1.0)
    assert factors.of(512) == 1.0
    other = CpuFactors()
    other.learn(512, 0.5)
    assert other.of(512) == other.of(2048) == 0.5


def test_time_of_rows_beyond_those_that_the_start_has_measured_first() -> None:
    """Rows of an expert count, not of the step: few experts with most rows are beyond, too."""
    rates = StreamRates(**H100, bend=(256, 5e-6))
    plain, beyond = StreamRates(**H100), 256 * (H100["cpu_row"] - 5e-6)
    assert rates.cpu_seconds(256) == plain.cpu_seconds(256)
    assert rates.cpu_seconds(512) == pytest.approx(plain.cpu_seconds(512) - beyond)
    assert rates.cpu_part(512, 0.5) == pytest.approx(rates.cpu_seconds(512) / 2)
    rates.left = [1.0, 0.25, 0.0]
    assert rates.cpu_part(512, 0.5) == pytest.approx(0.5 * plain.cpu_seconds(256))
    assert rates.cpu_part(512, 1.0) == 0.0


def test_graphs_are_there_for_what_the_start_may_have_got_wrong() -> None:
    """In 4096 rows a CPU that is a third as slow would have a part."""
    rates = StreamRates(**H100)
    assert rates.may_share(512) and rates.may_share(4096) and not rates.may_share(1 << 15)
    assert rates.share(4096, in_graphs=True) == 1.0


def test_large_experts_are_streamed_in_few_parts() -> None:
    """The host gives kernels part by part, and only then does the CPU begin."""
    small, large, huge = ring_of(2654208, 200), ring_of(45416448, 14), ring_of(1 << 30, 1)
    assert (small.parts, small.experts) == (6, 50) and (large.parts, large.experts) == (2, 8)
    assert (huge.parts, huge.experts) == (2, 1)
    assert max(small.nbytes, large.nbytes) <= RING_BYTES
    few, many = (StreamRates(**H100, parts=parts) for parts in (3, 32))
    assert few.share(512) == StreamRates(**H100).share(512)
    assert many.host_seconds(1.0) == pytest.approx(HOST_SECONDS + 29 * PART_SECONDS)
    assert many.share(512) > few.share(512)


def test_where_layers_are_graphs_the_cpu_gets_more() -> None:
    """And the split pays from fewer rows on; of very many rows all are streamed, as elsewhere."""
    rates = StreamRates(**H100)
    assert 0 < rates.share(512, in_graphs=True) < rates.share(512) < 1
    assert rates.share(128, in_graphs=True) > 0 and rates.share(128) == 0.0
    assert rates.share(2048, in_graphs=True) == rates.share(2048) == 1.0
    asked = StreamRates(**H100, least_rows=300)
    assert asked.share(299, in_graphs=True) == 0.0 and 0 < asked.share(300, in_graphs=True) < 1
