"""The governor over batches, acceptances, overlaps and a drifting machine: in made-up time, without a clock."""

from __future__ import annotations

import pytest

from governed_grid import BATCHES, OVERLAPS, PERIODS, SHAPES, Cell, best_fixed, governed
from tandem.engine.speculation.step_times import StepTimes

CELLS = [  # in which it once gained less than 0.93 of the best width
    *(Cell("none", 200.0, batch, 1.0, 0.3) for batch in BATCHES),
    *(Cell("foretold", 200.0, batch, 1.0, 0.3) for batch in BATCHES),
    Cell("none", 3000.0, 1, 0.0, 1.0), Cell("all", 200.0, 1, 0.0, 0.7), Cell("all", 200.0, 1, 1 / 3, 0.7),
    Cell("all", 200.0, 2, 0.0, 0.9), Cell("all", 200.0, 2, 1.0, 0.3), Cell("all", 200.0, 4, 1 / 3, 0.7),
    Cell("all", 200.0, 4, 1.0, 0.3), Cell("all", 200.0, 8, 0.0, 0.9), Cell("all", 200.0, 8, 1 / 3, 0.7),
    Cell("all", 200.0, 8, 1.0, 0.3), Cell("all", 3000.0, 1, 0.0, 0.7), Cell("all", 3000.0, 4, 1 / 3, 0.7),
    Cell("all", 3000.0, 4, 1 / 3, 0.9), Cell("foretold", 200.0, 8, 0.0, 0.9), Cell("foretold", 3000.0, 8, 1 / 3, 0.9),
    Cell("foretold", 3000.0, 8, 1.0, 0.3),
]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_it_gains_nearly_what_the_best_width_does(cell: Cell) -> None:
    assert min(governed(cell)) >= 0.93 * best_fixed(cell)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_rejected_drafts_cost_next_to_nothing(shape: str, batch: int) -> None:
    cells = [Cell(shape, period, batch, overlap, 0.0) for overlap in OVERLAPS for period in PERIODS]
    assert min(min(governed(cell, seeds=(11,))) for cell in cells) >= 0.98


def test_a_machine_s_pace_leaves_ratios_as_they_are() -> None:
    """It becomes slower while each step has drafts; the step without, now and then, agrees with what was thought."""
    times, pace = StepTimes(), 1.0
    for _ in range(8):
        times.observe(1, 0, 1.0)
    for i in range(512):
        pace *= 1.001
        times.observe(1, 2 if i % 64 else 0, (1.5 if i % 64 else 1.0) * pace)
        assert i < 3 or times.curve(1)(2) == pytest.approx(1.5, rel=0.05)
    assert times.plain(1) == pytest.approx(pace, rel=0.05)


def test_a_step_without_drafts_says_what_those_before_it_cost() -> None:
    """Steps without were measured on a machine that was a tenth slower."""
    times = StepTimes()
    for _ in range(8):
        times.observe(1, 0, 1.1)
    for i in range(65 * 8):
        times.observe(1, 2 if i % 65 else 0, 1.5 if i % 65 else 1.0)
    assert times.curve(1)(2) == pytest.approx(1.5, rel=0.02)


def test_what_was_measured_too_high_is_drawn_to_the_others() -> None:
    """Else it would not be tried again, though every number beside it has become cheap."""
    times = StepTimes()
    for draft_tokens, ratio in ((0, 1.0), (16, 1.9), (8, 1.2), (24, 1.6)):
        for _ in range(5):
            times.observe(8, draft_tokens, ratio)
    before = times.curve(8)(16)
    for i in range(400):
        times.observe(8, 24 if i % 2 else 8, 1.6 if i % 2 else 1.2)
    assert times.curve(8)(16) < 1.5 < before
    for _ in range(2000):
        times.observe(8, 0, 1.0)
    assert 1.3 < times.curve(8)(16) < 1.7  # however old
