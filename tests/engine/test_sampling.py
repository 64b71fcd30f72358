"""Sampling against straightforward references, and its independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import EOS, fake_engine, fake_logits, request, run, token_ids
from tandem.engine.limits import validate
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.sampler import draw, sample, uniform
from tandem.engine.sequence import Sequence
from tandem.errors import RequestError

VOCAB = 500


def random_row(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def sequence(params: SamplingSettings, prompt=(3, 4, 5), answer=(), seed: int = 0) -> Sequence:
    made = Sequence("x", 0, list(prompt), params, arrival=0, max_len=1000, page_size=16, seed=seed)
    made.tokens += answer
    return made


def reference_kept(row: np.ndarray, params: SamplingSettings) -> list[int]:
    """top_k, top_p, min_p by sorting everything, in float64."""
    scaled = row.astype(np.float64) / params.temperature
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp(scaled[i] - scaled[order[0]]) for i in order]
    total, kept, mass = sum(weights), [], 0.0
    for i, weight in zip(order, weights, strict=True):
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weight
    return [i for i in kept if math.exp(scaled[i] - scaled[order[0]]) >= params.min_p]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 5.0, 100.0]),
    top_k=st.sampled_from([0, -1, 2, 5, 50, 499, 500, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_keep_what_a_full_sort_keeps(seed, temperature, top_k, top_p, min_p) -> None:
    params = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = random_row(seed)
    kept = reference_kept(row, params)
    drawn = {draw(row, params, u, row.max()) for u in np.linspace(0, 1 - 2**-53, 400)}
    assert drawn <= set(kept)
    weights = np.exp((row[kept].astype(np.float64) - row.max()) / temperature)
    likely = {i for i, p in zip(kept, weights / weights.sum(), strict=True) if p > 1 / 399}
    assert likely <= drawn


def test_of_equal_tokens_the_lowest_ids_are_kept() -> None:
    row = np.array([1.0, 3.0, 1.0, 3.0, 1.0, 0.0, 1.0], dtype=np.float32)
    grid = np.linspace(0, 1 - 2**-53, 200)

    def kept(**filters) -> set[int]:
        return {draw(row, SamplingSettings(**filters), u, row.max()) for u in grid}

    assert kept(top_k=1) == {1} and kept(top_k=2) == {1, 3} and kept(top_k=4) == {0, 1, 2, 3}
    weight, total = math.exp(-2.0), 2 + 4 * math.exp(-2.0) + math.exp(-3.0)
    assert kept(top_p=(2 + 1.5 * weight) / total) == {0, 1, 2, 3}
    assert kept(top_k=6, min_p=0.1) == {0, 1, 2, 3, 4, 6}


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws; the 0.999 quantile with 49 degrees of freedom is 85.4."""
    params, row = SamplingSettings(temperature=1.5), random_row(1, vocab=50, spread=1.0)
    expected = np.exp(row.astype(np.float64) / 1.5)
    expected *= 20_000 / expected.sum()
    counts = np.zeros(50)
    for position in range(20_000):
        counts[draw(row, params, uniform(7, 0, position), row.max())] += 1
    assert ((counts - expected) ** 2 / expected).sum() < 85.4


def test_uniform_is_in_range_and_names_the_token() -> None:
    values = {uniform(s, i, p) for s in range(20) for i in range(5) for p in range(20)}
    assert len(values) == 2000 and min(values) >= 0.0 and max(values) < 1.0
    assert uniform(-1, 0, 5) == uniform(2**64 - 1, 0, 5)


def test_a_draw_never_lands_on_a_token_without_weight() -> None:
    row = np.array([-np.inf, 0.0, 1.0, -np.inf, -np.inf], dtype=np.float32)
    for params in (
        SamplingSettings(),
        SamplingSettings(top_p=0.99),
        SamplingSettings(top_k=3),
        SamplingSettings(min_p=1e-9),
    ):
        assert {draw(row, params, u, np.float32(1.0)) for u in (0.0, 0.5, 1 - 2**-53)} <= {1, 2}


def test_tiny_temperatures_are_greedy() -> None:
    row = random_row(3)
    for temperature in (0.0, 1e-300, 1e-45, 1e-8, 1e-4):
        [sampled] = sample(row[None], [sequence(SamplingSettings(temperature=temperature))], ())
        assert sampled.token_id == row.argmax()


def test_rows_without_a_finite_maximum_choose_nothing() -> None:
    rows = np.stack([random_row(0)] * 4)
    rows[1, 7], rows[2, 7], rows[3] = np.nan, np.inf, -np.inf
    got = sample(rows, [sequence(SamplingSettings(temperature=0.0))] * 4, ())
    assert [s.token_id for s in got] == [int(rows[0].argmax()), -1, -1, -1]


def test_penalties_that_leave_the_range_of_float32_end_their_row_only() -> None:
    rows = np.stack([random_row(0)] * 2)
    params = SamplingSettings(repetition_penalty=1e-40, temperature=0.7, top_k=5, top_p=0.9)
    prompt = [int(rows[0].argmax())]
    with np.errstate(over="ignore"):
        got = sample(rows, [sequence(params, prompt=prompt), sequence(SamplingSettings(temperature=0.0))], ())
    assert [s.token_id for s in got] == [-1, int(rows[1].argmax())]


def test_penalties_against_the_definition() -> None:
    params = SamplingSettings(
        temperature=0.0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias={9: 2.5, 3: -1.0}, top_k=1,
    )  # fmt: skip
    one = sequence(params, prompt=[3, 4, 4], answer=[5, 6, 6, 6])
    for seed in range(50):
        row = random_row(seed, vocab=12, spread=1.0)
        expected = row.astype(np.float64)
        for token in {3, 4, 5, 6}:
            expected[token] = expected[token] / 1.7 if expected[token] > 0 else expected[token] * 1.7
        expected[5] -= 0.4 + 0.3
        expected[6] -= 0.4 + 3 * 0.3
        expected[9] += 2.5
        expected[3] -= 1.0
        [sampled] = sample(row[None], [one], ())
        assert sampled.token_id == expected.argmax()


def test_penalties_follow_the_answer_as_it_grows() -> None:
    """Incremental counts equal counts from scratch: the engine's answer equals a loop without one."""
    params = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.8,
        "presence_penalty": -0.2,
        "ignore_eos": True,
    }
    got = token_ids(run(fake_engine(), request("a", [2, 3, 2], max_tokens=40, **params))["a", 0])
    tokens: list[int] = [2, 3, 2]
    for _ in range(40):
        one = sequence(SamplingSettings(temperature=0.0, **params), prompt=[2, 3, 2], answer=tokens[3:])
        tokens.append(sample(fake_logits(tokens)[None], [one], ())[0].token_id)
    assert got == tokens[3:]


def test_min_tokens_forbids_ends() -> None:
    row = np.zeros((1, VOCAB), dtype=np.float32)
    row[0, [1, 8]] = 50.0, 40.0
    params = SamplingSettings(temperature=0.0, min_tokens=2, stop_token_ids=(8,))
    assert sample(row, [sequence(params)], (1,))[0].token_id == 0
    assert sample(row, [sequence(params, answer=[5, 5])], (1,))[0].token_id == 1


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    params = SamplingSettings(temperature=0.3, top_p=0.5, frequency_penalty=2.0, logprobs=5, seed=1)
    rows = np.stack([random_row(s) for s in range(20)])
    reference = torch.log_softmax(torch.from_numpy(rows).double(), -1)
    for row, expected in zip(rows, reference, strict=True):
        [sampled] = sample(row[None], [sequence(params, answer=[5])], ())
        assert sampled.logprob.token_id == sampled.token_id
        # float32 exp has 2 ulp, summed in float64: relative error of the sum, absolute of its logarithm, < 3e-7;
        # logits up to 12 in float32 add nothing, they are exact.
        assert sampled.logprob.logprob == pytest.approx(float(expected[sampled.token_id]), abs=1e-6)
        top = torch.topk(expected, 5)
        assert [i for i, _ in sampled.logprob.top] == top.indices.tolist()
        assert [p for _, p in sampled.logprob.top] == pytest.approx(top.values.tolist(), abs=1e-6)


def test_prompt_logprobs_score_every_token_once() -> None:
    prompt = [2, 9, 4, 7, 7, 3, 12, 5, 30]
    for radix in (True, False):
        engine = fake_engine(max_step_tokens=4, radix_cache=radix)
        run(engine, request("warm", prompt))  # a cached prefix must not swallow rows
        scores = run(engine, request("a", prompt, prompt_logprobs=2, max_tokens=2, n=2))["a", 0][
            0
        ].prompt_logprobs
        assert [s.token_id for s in scores] == prompt and scores[0].logprob is None
        for i in range(1, len(prompt)):
            expected = torch.log_softmax(torch.from_numpy(fake_logits(prompt[:i])).double(), -1)
            assert scores[i].logprob == pytest.approx(float(expected[prompt[i]]), abs=1e-6)
            assert [t for t, _ in scores[i].top] == torch.topk(expected, 2).indices.tolist()


def test_a_seed_decides_whatever_else_is_in_the_batch() -> None:
    mine = request(
        "mine", [2, 3, 4], temperature=1.3, top_p=0.95, seed=11, n=2, max_tokens=24, ignore_eos=True
    )
    alone = run(fake_engine(), mine)
    others = [
        request(
            str(i), [i + 5] * (1 + 5 * i), temperature=0.9, top_k=20, seed=i, max_tokens=30, ignore_eos=True
        )
        for i in range(5)
    ]
    crowded_engine = fake_engine(num_pages=24, max_step_tokens=7)
    crowded = run(crowded_engine, *others[:3], mine, *others[3:])
    assert crowded_engine.stats().preemptions > 0
    for index in range(2):
        assert token_ids(crowded["mine", index]) == token_ids(alone["mine", index])
    assert token_ids(alone["mine", 0]) != token_ids(alone["mine", 1])


def test_without_a_seed_answers_differ() -> None:
    answers = run(fake_engine(), *[request(str(i), [2, 3], temperature=2.0, max_tokens=16) for i in range(4)])
    assert len({tuple(token_ids(o)) for o in answers.values()}) > 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e9), ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
        ("top_p", 0.0), ("top_p", 1.01), ("top_k", -2), ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 0.0), ("presence_penalty", 1e6), ("frequency_penalty", math.nan),
        ("n", 0), ("n", 1000), ("max_tokens", 0), ("max_tokens", -1), ("min_tokens", -1), ("min_tokens", 99),
        ("logprobs", -1), ("logprobs", 101), ("prompt_logprobs", 1000), ("seed", 2**64),
        ("stop", tuple(map(str, range(10_000)))), ("stop", ("",)), ("stop", ("x" * 5000,)),
        ("stop_token_ids", (500,)), ("stop_token_ids", (-1,)), ("logit_bias", {500: 1.0}),
        ("logit_bias", {3: math.nan}), ("logit_bias", {3: 101.0}),
    ],
)  # fmt: skip
def test_impossible_values_name_their_field(field, value) -> None:
    with pytest.raises(RequestError, match=field.split("_")[0]) as caught:
        validate(SamplingSettings(**({"max_tokens": 50} | {field: value})), VOCAB)
    assert caught.value.param == field


def test_sensible_values_pass() -> None:
    validate(SamplingSettings(), VOCAB)
    validate(
        SamplingSettings(
            temperature=2.0, top_p=0.9, top_k=-1, min_p=0.1, n=8, logprobs=20, seed=-5, stop=("a", "b"),
            stop_token_ids=(EOS,), logit_bias={3: -100.0}, max_tokens=5, min_tokens=5,
        ),
        VOCAB,
    )  # fmt: skip
