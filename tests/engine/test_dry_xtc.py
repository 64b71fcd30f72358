"""DRY, XTC and typical_p against plain definitions, in host memory and from a GPU's candidates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling import on_device
from tandem.engine.sampling.dry import LONGEST, dry_penalties
from tandem.engine.sampling.logits import DeviceLogits, HostLogits, HostRows, best_of
from tandem.engine.sampling.narrowing import narrowed
from tandem.engine.sampling.repetitions import Repetitions
from tandem.engine.sampling.sampler import coin_of, draw, uniform
from tandem.engine.sequence import Sequence

VOCAB = 1000


def random_row(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


def sequence(params: SamplingSettings, tokens: list[int], seed: int = 0) -> Sequence:
    return Sequence("r", 0, tokens, params, arrival=0, max_len=300_000, page_size=16, seed=seed)


# --- DRY


def plain_dry(tokens: list[int], params: SamplingSettings) -> dict[int, float]:
    """Every earlier place, one after the other, extended token by token."""
    if params.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    longest: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        length = 0
        while (
            length < LONGEST
            and length <= place
            and tokens[place - length] == tokens[-1 - length]
            and tokens[-1 - length] not in params.dry_breakers
        ):
            length += 1
        following = tokens[place + 1]
        if length >= params.dry_allowed_length and following not in params.dry_breakers:
            longest[following] = max(longest.get(following, 0), length)
    return {
        token: min(params.dry_multiplier * params.dry_base ** (n - params.dry_allowed_length), 1e4)
        for token, n in longest.items()
    }


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.sampled_from([-1, 0, 5, 30]),
    st.sets(st.integers(0, 3), max_size=2),
)  # fmt: skip
def test_dry_against_the_definition(tokens, allowed, last_n, breakers) -> None:
    params = SamplingSettings(
        dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=last_n, dry_breakers=tuple(breakers)
    )
    ids, penalties = dry_penalties(sequence(params, tokens))
    expected = plain_dry(tokens, params)
    assert set(ids.tolist()) == set(expected) and len(ids) == len(expected)
    for token, penalty in zip(ids.tolist(), penalties.tolist(), strict=True):
        assert penalty == pytest.approx(expected[token], rel=1e-6)  # float32


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=70), min_size=1, max_size=5), st.integers(1, 3),
    st.sampled_from([-1, 3, 40, 90]), st.sets(st.integers(0, 2), max_size=1),
)  # fmt: skip
def test_dry_token_by_token(pieces, allowed, last_n, breakers) -> None:
    """What is kept from token to token, or from one piece to the next, is what a fresh look finds: of texts shorter
    and longer than what counts of a repetition."""
    params = SamplingSettings(
        dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=last_n, dry_breakers=tuple(breakers)
    )
    kept = sequence(params, pieces[0])
    for piece in [[], *pieces[1:], *[[token] for token in pieces[-1]]]:
        kept.tokens += piece
        ids, penalties = dry_penalties(kept)
        expected = plain_dry(kept.tokens, params)
        assert dict(zip(ids.tolist(), penalties.tolist(), strict=True)) == pytest.approx(expected, rel=1e-6)
        assert len(ids) == len(expected)


def test_a_token_costs_dry_its_own_places_only(monkeypatch) -> None:
    """Not the whole text: by what is looked at, not by time."""
    looked: list[int] = []
    plain = Repetitions._lengths_at
    monkeypatch.setattr(
        Repetitions, "_lengths_at", lambda self, places: (looked.append(len(places)), plain(self, places))[1]
    )
    text = [int(i) for i in np.random.default_rng(0).integers(0, 900, 200_000)]
    long = sequence(SamplingSettings(dry_multiplier=0.8), text)
    dry_penalties(long)
    looked.clear()
    for token in text[1000:1020]:
        long.tokens.append(token)
        ids, _ = dry_penalties(long)
    assert len(looked) == 20 and max(looked) < 400 and text[1020] in ids
    assert plain_dry(long.tokens[-3000:], long.sampling).keys() <= set(ids.tolist())


def test_dry_breaks_a_loop_that_greedy_decoding_would_not_leave() -> None:
    row = np.zeros((1, VOCAB), dtype=np.float32)
    loop = [1, 2, 3, 4] * 20
    row[0, 1], row[0, 7] = 10.0, 9.0
    greedy, dry = SamplingSettings(temperature=0.0), SamplingSettings(temperature=0.0, dry_multiplier=0.8)
    for params, token in ((greedy, 1), (dry, 7)):
        for logits in (HostLogits(row), device_logits(row)):
            assert logits.chosen([0], [sequence(params, loop)], ())[0].token_id == token


def test_a_long_repetition_leaves_finite_logits() -> None:
    params = SamplingSettings(dry_multiplier=100.0, dry_base=100.0, dry_allowed_length=1)
    _, penalties = dry_penalties(sequence(params, [5] * 3000))
    assert penalties.tolist() == [1e4]


# --- XTC and typical_p


def plain_typical(probabilities: np.ndarray, mass: float) -> set[int]:
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    order = sorted(
        (i for i, p in enumerate(probabilities) if p > 0),
        key=lambda i: abs(-math.log(probabilities[i]) - entropy),
    )
    kept, total = set[int](), 0.0
    for i in order:
        kept.add(i)
        total += probabilities[i]
        if total >= mass:
            break
    return kept


def plain_xtc(probabilities: np.ndarray, threshold: float) -> set[int]:
    top = sorted((i for i, p in enumerate(probabilities) if p >= threshold), key=lambda i: -probabilities[i])
    return set(range(len(probabilities))) - set(top[:-1])


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mass", [0.1, 0.5, 0.95])
def test_typical_p_against_the_definition(seed, mass) -> None:
    row = random_row(seed)
    row[:10] = -np.inf  # a mask's
    kept = narrowed(row, SamplingSettings(typical_p=mass), 1.0)
    assert set(kept.tolist()) == plain_typical(softmax(row), mass) and list(kept) == sorted(kept)


@pytest.mark.parametrize("mass", [0.2, 0.9])
def test_typical_p_as_in_transformers(mass) -> None:
    warper = pytest.importorskip("transformers").TypicalLogitsWarper(mass)
    for seed in range(10):
        row = random_row(seed)
        theirs = warper(None, torch.from_numpy(row)[None])[0].isfinite().nonzero().flatten().tolist()
        assert narrowed(row, SamplingSettings(typical_p=mass), 1.0).tolist() == theirs


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.3])
def test_xtc_against_the_definition(seed, threshold) -> None:
    row = random_row(seed, spread=4.0)
    params = SamplingSettings(xtc_probability=0.5, xtc_threshold=threshold)
    assert set(narrowed(row, params, 0.4).tolist()) == plain_xtc(softmax(row), threshold)
    assert len(narrowed(row, params, 0.5)) == len(row)  # the coin says no


def test_xtc_acts_as_often_as_it_should() -> None:
    params, thrown = SamplingSettings(xtc_probability=0.3), 4000
    coins = [coin_of(sequence(params, [1] * (1 + i % 50), seed=i)) for i in range(thrown)]
    share = sum(coin < 0.3 for coin in coins) / thrown
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / thrown)
    assert coin_of(sequence(params, [1, 2], seed=3)) != uniform(3, 0, 2)  # not the number that chooses
    assert coin_of(sequence(SamplingSettings(), [1, 2])) == 1.0


def test_typical_p_comes_before_xtc_and_both_behind_the_others() -> None:
    row = random_row(1, spread=1.8)
    params = SamplingSettings(top_k=30, top_p=0.95, typical_p=0.9, xtc_probability=1.0, xtc_threshold=0.05)
    base = SamplingSettings(top_k=30, top_p=0.95)
    grid = np.linspace(0, 1 - 2**-53, 3000)
    left = sorted({draw(row, base, u, row.max()) for u in grid})
    probabilities = softmax(row[left])
    typical = sorted(plain_typical(probabilities, 0.9))
    again = probabilities[typical] / probabilities[typical].sum()
    expected = {left[typical[i]] for i in plain_xtc(again, 0.05)}
    drawn = {draw(row, params, u, row.max(), 0.0) for u in grid}
    assert drawn == expected and 3 < len(expected) < len(typical) < len(left)


# --- from candidates


def device_logits(rows: np.ndarray) -> DeviceLogits:
    tensor = torch.from_numpy(rows)
    return DeviceLogits(tensor, best_of(tensor), HostRows(torch.device("cpu")))


CASES = [
    {"typical_p": 0.9}, {"typical_p": 0.5, "top_k": 40}, {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "min_p": 0.02}, {"typical_p": 0.8, "top_p": 0.9},
    {"xtc_probability": 0.7, "top_k": 100, "min_p": 0.01, "typical_p": 0.95},
    {"dry_multiplier": 1.0, "xtc_probability": 0.5, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_candidates_choose_the_same_tokens(case) -> None:
    rows = np.stack([random_row(seed) for seed in range(60)])
    sequences = [sequence(SamplingSettings(**case), [1, 2, 3, 1, 2], seed=seed) for seed in range(60)]
    places = list(range(60))
    host = HostLogits(rows).chosen(places, sequences, ())
    assert device_logits(rows).chosen(places, sequences, ()) == host


def test_candidates_suffice_where_other_filters_leave_few(monkeypatch) -> None:
    """Rows are not fetched whole then."""
    rows = np.stack([random_row(seed) for seed in range(20)])
    for case in ({"min_p": 0.05}, {"top_k": 50}, {"top_p": 0.8}):
        params = SamplingSettings(xtc_probability=0.5, typical_p=0.9, **case)
        sequences = [sequence(params, [1, 2], seed=seed) for seed in range(20)]
        tensor = torch.from_numpy(rows)
        chosen = on_device.choose(tensor.__getitem__, best_of(tensor).numpy(), sequences)
        assert all(sampled is not None for sampled in chosen)
