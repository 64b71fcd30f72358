"""Where no draft pays, a step costs what it costs without: nobody is asked, drawn or told."""

from __future__ import annotations

from collections import Counter

import pytest

from governed_grid import Cell, Decoding, Text
from tandem.engine.speculation.draft import LAYER_KINDS, Draft
from tandem.engine.speculation.dry_run_drafts import CHEAP_ROWS
from tandem.engine.speculation.speculation import _cheapest


class Counted:
    """Calls of a decoding's drafter and governor."""

    def __init__(self, decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = Counter[str]()
        speculation = decoding.speculation
        for owner, names in ((speculation._drafter, ("propose", "draw")), (speculation._governor, ("widths", "learn"))):
            for name in names:
                monkeypatch.setattr(owner, name, self._counting(name, getattr(owner, name)))

    def _counting(self, name: str, call):
        def counted(*args):
            self.calls[name] += 1
            return call(*args)

        return counted


@pytest.mark.parametrize("shape", ["all", "none"])
@pytest.mark.parametrize("batch", [1, 8])
def test_rejected_drafts_leave_most_steps_alone(batch: int, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(Cell(shape, 200.0, batch, 1 / 3, 0.0), 1)
    decoding.gain(600)
    counted = Counted(decoding, monkeypatch)
    gain, steps = decoding.gain(3000), 3000
    assert counted.calls["widths"] <= steps / 10
    assert counted.calls["propose"] == batch * counted.calls["widths"]
    assert counted.calls["draw"] <= steps / 64 + 1
    assert counted.calls["learn"] <= batch * counted.calls["draw"]
    assert gain >= 0.99
    assert decoding.speculation.stats().widths[0] >= batch * (steps + 590)


def test_a_sequence_that_comes_is_asked_about_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(Cell("all", 200.0, 1, 1 / 3, 0.0), 1)
    decoding.gain(601)
    while not decoding.speculation._quiet_left > 2:
        decoding._step()
    counted = Counted(decoding, monkeypatch)
    decoding._step()
    assert not counted.calls
    decoding.texts.append(Text(tokens=[0, 0]))
    decoding._step()
    assert counted.calls["propose"] == 2


def test_steps_in_which_nobody_is_asked_count_as_steps_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """So trials and comparisons come as they would."""
    decoding = Decoding(Cell("none", 200.0, 1, 1 / 3, 0.0), 1)
    counted = Counted(decoding, monkeypatch)
    decoding.gain(1000)
    drawn = counted.calls["draw"]
    decoding.gain(640)
    assert 4 <= counted.calls["draw"] - drawn <= 10


def test_an_answer_s_last_step_counts_with_its_drafts() -> None:
    """It is forgotten before the step is told of."""
    decoding = Decoding(Cell("all", 200.0, 1, 1 / 3, 1.0), 1, fixed=2)
    speculation, [text] = decoding.speculation, decoding.texts
    found = speculation.draft_tokens([text], 64, lambda sequence, n: True)
    turns = [decoding._turn(text, found[0])]
    speculation.forget(text)
    speculation.ran(turns, 1.0)
    assert speculation.stats().widths == [0, 0, 1]


@pytest.mark.parametrize(
    ("lacking", "drawn"),
    [((10, 2000, 100, 3000), (0, 2)), ((4000, 2000, 1000, 3000), (2,)), ((CHEAP_ROWS, 1), (0, 1)), ((), ())],
)
def test_rows_of_long_prompts_are_not_made_to_compare_drafts(lacking: tuple[int, ...], drawn: tuple[int, ...]) -> None:
    """One sequence's at most, where all have long ones."""
    texts = [Text(tokens=[0] * n) for n in lacking]

    class Lacking:
        def behind(self, sequence: Text) -> int:
            return sequence.total_len

    offers = [Draft((), (LAYER_KINDS, LAYER_KINDS + 1))] * len(texts)
    assert _cheapest(Lacking(), texts, offers) == [(texts[i], 2) for i in drawn]
