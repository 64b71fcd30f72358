"""Who drafts, how many draft tokens are worth a row, and what is said of it."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_folding import folding_config
from plans import MODEL, machine
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Chunk
from tandem.engine.speculation import ngram
from tandem.engine.speculation.draft import Draft
from tandem.engine.speculation.draft_length import PROBE_EVERY, DraftLengthController, FixedDraftLength
from tandem.engine.speculation.ngram import NGram, kind_of
from tandem.engine.speculation.speculation import Speculation
from tandem.engine.speculation.step_times import Curve, StepTimes, rounded
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.speculation import speculation, speculation_notices
from tandem.planner.resolve import resolve
from tandem.spec.model_config import ForeignCode


class Text(SimpleNamespace):
    """Of a sequence, what drafters read."""

    __hash__ = object.__hash__


def text(tokens) -> Text:
    return Text(tokens=list(tokens))


# -- n-grams ---


def longest_match(tokens: list[int], least: int, longest: int) -> tuple[int, int]:
    """(place, tokens), found by comparing everything: the longest of the newest candidates, then the newest."""
    end, candidates = len(tokens), []
    for place in range(end - 1, least - 1, -1):
        if tokens[place - least : place] == tokens[end - least :]:
            candidates.append(place)
    best = (0, 0)
    for place in candidates[: ngram.CANDIDATES]:
        length = next(n for n in range(longest, 0, -1) if place >= n and tokens[place - n : place] == tokens[end - n :])
        if length > best[1]:
            best = (place, length)
    return best


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60), least=st.integers(1, 3), most=st.integers(1, 6))
def test_a_text_is_searched_for_its_end(tokens, least: int, most: int) -> None:
    draft = NGram(least, 5).propose(text(tokens), most)
    place, length = longest_match(tokens, least, 5)
    if not place:
        assert draft is None
        return
    expected = tokens[place:]
    while len(expected) < most:  # on with itself
        expected.append(expected[len(expected) - (len(tokens) - place)])
    assert draft == Draft(tuple(expected[:most]), tuple(kind_of(length + i) for i in range(most)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_growing_text_is_followed(tokens, least: int, chance: random.Random) -> None:
    """Whatever arrives at a time: its match is one, at least as long as it says, and what follows it is drafted."""
    drafter, grown = NGram(least, 5), text([])
    while len(grown.tokens) < len(tokens):
        grown.tokens += tokens[len(grown.tokens) :][: chance.randint(1, 4)]
        draft = drafter.propose(grown, 3)
        place, _ = longest_match(grown.tokens, least, 5)
        assert (draft is None) == (place == 0)
        if draft is not None:
            inner = drafter._texts[grown]
            assert grown.tokens[inner.at - inner.matched : inner.at] == grown.tokens[-inner.matched :]
            assert inner.matched >= least and draft.tokens[0] == grown.tokens[inner.at]


def test_each_token_is_read_once(monkeypatch) -> None:
    """However long the text is, a new token costs one entry and a bounded number of comparisons."""
    compared = []
    length = ngram._SequenceText._length
    monkeypatch.setattr(
        ngram._SequenceText, "_length", lambda self, place: compared.append(place) or length(self, place)
    )
    drafter, long = NGram(2, 16), text([i % 50 for i in range(3000)])
    drafter.propose(long, 7)
    entries = len(drafter._texts[long]._older)
    for i in range(200):
        compared.clear()
        long.tokens.append(i % 7)
        drafter.propose(long, 7)
        assert len(compared) <= ngram.CANDIDATES
    assert len(drafter._texts[long]._older) == entries + 200


def test_a_long_prompt_is_learnt_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(ngram, "TOKENS_AT_ONCE", 100)
    drafter, long = NGram(2, 16), text([*range(250), *range(40)])
    assert [drafter.propose(long, 2) is None for _ in range(3)] == [True, True, False]
    assert drafter.propose(long, 2).tokens == (40, 41)
    drafter.forget(long)
    assert not drafter._texts


def test_long_prompts_share_a_step(monkeypatch) -> None:
    """Together they learn no more than one alone."""
    learnt = []
    index = ngram._SequenceText._index
    monkeypatch.setattr(
        ngram._SequenceText, "_index", lambda self, end: learnt.append(end - self._known) or index(self, end)
    )
    drafter, texts = NGram(2, 16), [text(range(20_000)) for _ in range(16)]
    for each in texts:
        drafter.propose(each, 3)
    learnt.clear()
    for each in texts:
        drafter.propose(each, 3)
    assert sum(learnt) == ngram.TOKENS_AT_ONCE


def test_two_texts_of_one_hash_are_no_match(monkeypatch) -> None:
    monkeypatch.setattr(ngram, "hash", lambda _: 1, raising=False)
    assert NGram(2, 8).propose(text([1, 2, 3, 4]), 2) is None
    assert NGram(2, 8).propose(text([1, 2, 3, 1, 2]), 2).tokens == (3, 1)


# -- what draft tokens cost, and which are worth it ---


def test_costs_go_through_what_was_measured() -> None:
    curve = Curve({2: 1.5, 6: 2.5}, 0.4)
    assert [curve(n) for n in (0, 1, 2, 4, 6, 8)] == pytest.approx([1.0, 1.25, 1.5, 2.0, 2.5, 3.0])
    times = StepTimes()
    assert times.plain(1) is None
    for seconds in (9.0, 1.0, 1.0):  # the first step compiles, records, reads from files
        times.observe(1, 0, seconds)
    assert times.plain(1) == 1.0
    for seconds in (50.0, 1.5, 1.5):
        times.observe(1, 2, seconds)
    assert times.curve(1)(2) == pytest.approx(1.5)
    times.observe(1, 2, 1000.0)  # a pause
    assert times.curve(1)(2) < 1.7
    assert [rounded(n) for n in (1, 8, 9, 11, 12, 63, 64)] == [1, 8, 8, 10, 12, 56, 64]


def test_more_rows_never_take_less() -> None:
    """Where they seem to, steps without drafts were measured on a machine that was slower then."""
    times = StepTimes()
    for _ in range(3):
        times.observe(1, 0, 2.0)
    for _ in range(6):
        times.observe(1, 3, 1.3)
        assert times.curve(1)(3) >= 1.0
    assert times.plain(1) == pytest.approx(1.3)


def test_drafts_of_many_sequences_are_tried_at_once() -> None:
    """One of each costs as much of a longer step, until more is known."""
    assert StepTimes().curve(8)(8) == pytest.approx(StepTimes().curve(1)(1))
    world = World(0.95, 0.02, sequences=8)
    _, widths = world.run(12)
    assert sum(widths) > 100


class World:
    """Sequences whose draft tokens are accepted with a constant chance; steps take as long as their rows say."""

    def __init__(
        self, acceptance: float, slope: float, sequences: int = 1, governor: DraftLengthController | None = None
    ) -> None:
        self.governor, self.slope, self.acceptance = governor or DraftLengthController(StepTimes()), slope, acceptance
        self.sequences = [text([]) for _ in range(sequences)]
        self._chance = random.Random(7)

    def run(self, steps: int, most: int = 4) -> tuple[float, list[int]]:
        """Tokens per second, beside what they would be without drafts; and the widths of all steps."""
        tokens, seconds, seen = 0, 0.0, []
        for _ in range(steps):
            rights = [[self._chance.random() < self.acceptance for _ in range(most)] for _ in self.sequences]
            drafts = [Draft((1,) * most, (2,) * most) for _ in self.sequences]
            widths = self.governor.widths(self.sequences, drafts, 64)
            for sequence, draft, width, right in zip(self.sequences, drafts, widths, rights, strict=True):
                kept = 0
                while kept < width and right[kept]:
                    kept += 1
                came = [1] * kept + [1 if kept == width and kept < most and right[kept] else 0]
                self.governor.learn(sequence, draft, came)
                tokens += len(came)
            took = (1.0 + self.slope * sum(widths)) * self._chance.uniform(0.97, 1.03)
            self.governor.times.observe(len(widths), sum(widths), took)
            seconds += took
            seen += widths
        return tokens / seconds / len(self.sequences), seen


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("slope", [0.05, 0.3, 0.9])
def test_bad_drafts_cost_next_to_nothing(slope: float, sequences: int) -> None:
    world = World(0.05, slope / sequences, sequences)
    world.run(100)  # to learn
    gain, widths = world.run(400)
    assert gain >= 0.97 and sum(widths) <= 0.1 * len(widths) * (4 if slope < 0.1 else 1)


@pytest.mark.parametrize(("acceptance", "slope"), [(0.9, 0.1), (0.9, 0.3), (0.7, 0.2), (0.95, 0.6)])
def test_good_drafts_gain_nearly_what_the_best_width_does(acceptance: float, slope: float) -> None:
    best = max(
        sum(acceptance**i for i in range(width + 1)) / (1.0 + slope * width) for width in range(5)
    )
    world = World(acceptance, slope)
    world.run(100)
    gain, _ = world.run(600)
    assert gain >= 0.93 * best


def test_it_says_what_it_believes() -> None:
    """Of steps like the last, and of draft tokens so far."""
    world = World(0.9, 0.2, sequences=2)
    assert world.governor.believed(2, 4) == ([], [])
    world.run(300)
    seconds, chances = world.governor.believed(2, 4)
    assert seconds == pytest.approx([1.0 + 0.2 * 2 * width for width in range(5)], rel=0.1)
    assert chances == pytest.approx([0.9], abs=0.05)
    assert FixedDraftLength().believed(2, 4) == ([], [])


def test_dear_rows_are_not_bought() -> None:
    """Each draft token reads as much as a token of its own: nothing can be gained, and little is lost to see that."""
    gain, widths = World(0.9, 0.95).run(500)
    assert gain >= 0.97 and sum(width > 0 for width in widths) < 50


def test_it_notices_when_rows_become_cheap_or_dear() -> None:
    world = World(0.9, 0.1)
    assert sum(world.run(200)[1][100:]) > 250
    world.slope = 1.5
    world.run(300)
    assert world.run(200)[0] >= 0.93
    world.slope = 0.1
    world.run(20 * PROBE_EVERY)
    assert world.run(200)[0] > 2.0


def test_sequences_share_a_step_s_rows_by_their_chances() -> None:
    governor, good, bad = DraftLengthController(StepTimes()), text([]), text([])
    draft = Draft((1,) * 4, (2,) * 4)
    for _ in range(60):
        governor.learn(good, draft, [1, 1, 1, 1, 1])
        governor.learn(bad, draft, [0])
        governor.times.observe(2, 0, 1.0)
    for draft_tokens in (2, 4, 6):
        for _ in range(4):
            governor.times.observe(2, draft_tokens, 1.0 + 0.1 * draft_tokens)
    first, second = governor.widths([good, bad], [draft, draft], 64)
    assert first == 4 and second <= 1
    assert governor.widths([good, bad], [draft, None], 2) == [2, 0]
    assert governor.widths([good, bad], [None, None], 2) == [0, 0]
    governor.forget(good)
    governor.forget(bad)
    assert not governor._known
    assert FixedDraftLength().widths([good, bad], [draft, draft], 6) == [4, 2]


class Same(NGram):
    """Always drafts two tokens."""

    def propose(self, sequence, most: int) -> Draft | None:
        return Draft((1, 2)[:most], (3, 4)[:most])


def turn_of(sequence, draft_tokens: tuple[int, ...] = (), tokens: int = 1) -> SimpleNamespace:
    chunk = Chunk(sequence, 1 + len(draft_tokens), 1, draft_tokens)
    return SimpleNamespace(sequence=sequence, chunk=chunk, tokens=tokens)


def test_only_the_step_that_was_asked_for_is_learnt_from() -> None:
    """Whatever else runs or fails in between, and once."""
    made = Speculation(Same(2, 4), "made up", 2, governed=False)
    first, second, other = (Text(tokens=[5, 1], answer_len=1, max_len=9, total_len=2) for _ in range(3))
    assert made.draft_tokens([first, second], 8, lambda sequence, n: True) == [(1, 2), (1, 2)]
    made.ran([], 1.0)  # it failed
    made.ran([turn_of(other)], 1.0)  # a prompt
    made.ran([turn_of(first)], 1.0)
    assert made.stats().steps == made.stats().draft_tokens == 0
    for _ in range(2):
        made.ran([turn_of(first, (1, 2), 2), turn_of(second, (1, 2), 1)], 1.0)
    stats = made.stats()
    assert (stats.steps, stats.draft_tokens, stats.accepted_tokens, stats.widths) == (1, 4, 1, [0, 0, 2])


# -- what is asked for ---


def plan_of(*argv: str, device: str = "cpu"):
    return resolve(EngineConfig.from_args(["demo", "--device", device, *argv]), MODEL, machine())


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_more_sequences_than_rows_get_no_drafts(rows: int) -> None:
    """`room` would be below 0: nobody is asked."""
    asked = SimpleNamespace(draft_tokens=lambda sequences, room: pytest.fail(f"asked for {room}"))
    scheduler = object.__new__(Scheduler)
    scheduler._proposer, scheduler._most_logits_rows = asked, rows
    chunks = [Chunk(SimpleNamespace(), 1, 1)] * 4
    assert scheduler._with_drafts(chunks) is chunks


def test_flags_make_a_plan() -> None:
    assert plan_of().speculation is None
    asked = plan_of("--speculative-algorithm", "ngram").speculation
    assert (asked.algorithm, asked.most_draft_tokens, asked.governed) == ("NGRAM", 7, True)
    asked = plan_of("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4").speculation
    assert asked.most_draft_tokens == 3
    line = "--speculative-algorithm NGRAM --speculative-num-steps 5 --speculative-num-draft-tokens 6"
    more = "--speculative-ngram-min-match-window-size 3 --disable-speculative-governor --speculative-eagle-topk 1"
    plan = plan_of(*line.split(), *more.split())
    asked = plan.speculation
    assert (asked.most_draft_tokens, asked.least_match, asked.longest_match, asked.governed) == (5, 3, 16, False)
    assert [n for n in plan.notices if n.startswith("--speculative-eagle-topk changes nothing")]
    assert [d.value for d in plan.decisions if d.name == "speculation"] == ["NGRAM, up to 5 draft tokens a step"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--speculative-algorithm NEXTN", "NEXTN: the checkpoint has no draft layer.*NGRAM"),
        ("--speculative-algorithm EAGLE", "EAGLE: the checkpoint has no draft layer.*NGRAM"),
        ("--speculative-algorithm DRAFT", "must be one of NGRAM, NEXTN, EAGLE"),
        ("--speculative-algorithm NGRAM --speculative-num-steps 3 --speculative-num-draft-tokens 3", "give one"),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 1", "from 2 to 64"),
        ("--speculative-algorithm NGRAM --speculative-eagle-topk 2", "Use 1"),
        ("--speculative-algorithm NGRAM --speculative-ngram-min-match-window-size 17", "more than"),
    ],
)
def test_what_cannot_be_drafted_is_refused(line: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_of(*line.split())


def test_flags_without_an_algorithm_change_nothing() -> None:
    plan = plan_of("--speculative-num-steps", "3")
    assert plan.speculation is None
    assert [n for n in plan.notices if n.startswith("--speculative-num-steps changes nothing: no --specul")]


def test_models_that_cannot_take_rows_back_decode_one_token() -> None:
    config = EngineConfig.from_args(["demo", "--speculative-algorithm", "NGRAM"])
    assert speculation(config, MODEL) is not None
    assert speculation(config, folding_config()) is None
    [said] = speculation_notices(config, folding_config())
    assert said.startswith("--speculative-algorithm NGRAM changes nothing: part of its state holds several tokens")
    alone = replace(MODEL, foreign=ForeignCode("{}", why_single="it has a cache of its own"))
    [said] = speculation_notices(config, alone)
    assert speculation(config, alone) is None and "it has a cache of its own" in said
