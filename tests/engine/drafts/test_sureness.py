"""What a draft says of its tokens: it is believed as far as they are accepted, and may only shorten."""

from __future__ import annotations

import random

import pytest

from tandem.engine.speculation.confidence import PARTS, ConfidenceCalibration
from tandem.engine.speculation.draft import LAYER_KINDS, Draft
from tandem.engine.speculation.draft_length import DraftLengthController, FixedDraftLength
from tandem.engine.speculation.step_times import StepTimes

SIZE = 5
KINDS = tuple(range(LAYER_KINDS, LAYER_KINDS + SIZE))


def said(*sure: float) -> Draft:
    return Draft((1,) * len(sure), KINDS[: len(sure)], sure)


def measured(slope: float, sequences: int = 1) -> StepTimes:
    """A step takes so much longer for each draft token."""
    times = StepTimes()
    for width in (0, 1, 2, 3, 4, 5) * 4:
        times.observe(sequences, sequences * width, 1.0 + slope * width)
    return times


def test_its_word_counts_until_it_was_compared() -> None:
    known = ConfidenceCalibration()
    assert known.chances(said(0.9, 0.2), 2) == pytest.approx([0.9, 0.2 * 0.9], abs=1.5 / PARTS)
    assert known.chances(Draft((1, 1), KINDS[:2]), 2) == [1.0, 1.0]
    for _ in range(600):
        known.learn(said(0.9, 0.2), [1, 0])
    assert known.chances(said(0.9, 0.2), 2) == pytest.approx([1.0, 0.0], abs=0.05)


def test_what_comes_behind_a_rejected_draft_tells_nothing() -> None:
    known = ConfidenceCalibration()
    before = known.chances(said(0.2), 1)
    for _ in range(50):
        known.learn(said(0.9, 0.2), [0, 1])
    assert known.chances(said(0.2), 1) == before


def test_a_draft_that_computes_nan_is_not_sure() -> None:
    nan, governor = float("nan"), DraftLengthController(measured(0.3))
    assert governor.shortened([said(nan, 0.9, 0.9)], [3]) == [1]
    governor.learn(object(), said(nan), [1])


@pytest.mark.parametrize(("sure", "width"), [
    ((0.95, 0.95, 0.95, 0.95, 0.95), 5), ((0.95, 0.95, 0.05, 0.95, 0.95), 2), ((0.02, 0.9, 0.9, 0.9, 0.9), 1),
])  # fmt: skip
def test_unlikely_drafts_get_no_row_where_rows_are_dear(sure: tuple[float, ...], width: int) -> None:
    governor = DraftLengthController(measured(0.3))
    assert governor.shortened([said(*sure)], [SIZE]) == [width]
    assert DraftLengthController(measured(0.001)).shortened([said(*sure)], [SIZE]) == [SIZE]  # all but free
    assert FixedDraftLength().shortened([said(*sure)], [SIZE]) == [SIZE]


def test_sequences_share_rows_by_what_is_said_and_nobody_gets_more() -> None:
    governor = DraftLengthController(measured(0.3, 2))
    good, bad = said(*[0.95] * SIZE), said(*[0.05] * SIZE)
    assert governor.shortened([good, bad], [3, 4]) == [3, 0]
    assert governor.shortened([good, None], [3, 0]) == [3, 0]
    silent = Draft((1,) * SIZE, KINDS)
    assert governor.shortened([silent, None], [4, 0]) == [4, 0]


def test_trials_keep_their_rows() -> None:
    """Else what they cost would never be known."""
    governor = DraftLengthController(measured(0.3))
    governor._measures = True
    assert governor.shortened([said(0.9, 0.01, 0.01)], [3]) == [3]


def gain(says: bool, seed: int = 3, steps: int = 2500) -> float:
    """Text of two sorts in turns, easy and hard; tokens a second. says: whether the draft tells which it is."""
    drawn, governor, text = random.Random(seed), DraftLengthController(StepTimes()), object()
    tokens, seconds = 0, 0.0
    for step in range(steps):
        chances = [0.95 if drawn.random() < 0.6 else 0.25 for _ in range(SIZE)]
        right = [drawn.random() < chance for chance in chances]
        draft = Draft((1,) * SIZE, KINDS, tuple(chances) if says else ())
        offered = governor.widths([text], [Draft((), KINDS)], 64)
        [width] = governor.shortened([draft], offered) if offered[0] else offered
        kept = next((i for i, hit in enumerate(right[:width]) if not hit), width)
        came = [1] * kept + [1 if kept == width < SIZE and right[kept] else 0]
        if width:
            governor.learn(text, draft, came)
        took = 1.0 + 0.2 * width
        governor.times.observe(1, width, took)
        tokens, seconds = tokens + (step >= 500) * len(came), seconds + (step >= 500) * took
    return tokens / seconds


def test_knowing_which_drafts_are_good_gains() -> None:
    assert gain(True) > 1.015 * gain(False) > 1.3
