"""Continuous batching, paging, preemption and the prefix cache, with random traffic on a fake model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import (
    FakeModel,
    FakeTokenizer,
    check_pages,
    fake_config,
    fake_engine,
    fake_plan,
    foretold_engine,
    greedy_reference,
    request,
    run,
    text,
    token_ids,
)
from tandem.engine.engine import Engine
from tandem.engine.pace import PrefillPace
from tandem.engine.start.parts import EngineParts
from tandem.errors import RequestError

prompts = st.lists(st.integers(2, 5), min_size=1, max_size=24)
WISHES: dict[str, dict] = {
    "nothing": {},
    "scores": {"prompt_logprobs": 2, "logprobs": 1},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "nucleus": {"temperature": 1.5, "top_p": 0.9, "seed": 7},
    "stop": {"stop": ("Z", "A", "bc", "cd")},
    "least": {"min_tokens": 4, "stop_token_ids": (9, 12, 20, 33), "logit_bias": {9: 3.0, 12: 2.0}},
    "narrow": {"temperature": 1.2, "dry_multiplier": 0.8, "xtc_probability": 0.5, "seed": 3, "min_p": 0.02},
}
arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        prompts,
        st.integers(1, 12),  # max_tokens
        st.integers(1, 3),  # n
        st.one_of(st.none(), st.integers(0, 20)),  # step of its abort
        st.sampled_from(sorted(WISHES)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals,
    num_pages=st.integers(9, 24),
    max_running=st.integers(1, 5),
    max_step_tokens=st.integers(1, 20),
    radix_cache=st.booleans(),
    page_size=st.sampled_from([4, 5]),
    acceptance=st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_random_traffic(
    arrivals, num_pages, max_running, max_step_tokens, radix_cache, page_size, acceptance
) -> None:
    """acceptance: of draft tokens of what each answer is when it runs alone; None: nothing is drafted."""
    known = [
        run(fake_engine(), request("alone", prompt, **wanted(max_tokens, n, wish)))
        for _, prompt, max_tokens, n, _, wish in arrivals
    ]
    foretold = {
        (str(i), index): token_ids(o) for i, each in enumerate(known) for (_, index), o in each.items()
    }
    plan = {
        "num_pages": num_pages, "max_running_requests": max_running, "max_step_tokens": max_step_tokens,
        "radix_cache": radix_cache, "page_size": page_size,
    }  # fmt: skip
    engine = fake_engine(**plan) if acceptance is None else foretold_engine(foretold, acceptance, **plan)
    answers: dict[tuple[str, int], list] = {}
    for step in range(2000):
        for i, (arrival, prompt, max_tokens, n, abort, wish) in enumerate(arrivals):
            if arrival == step:
                engine.add(request(str(i), prompt, **wanted(max_tokens, n, wish)))
            if abort == step:
                engine.abort(str(i))
                check_pages(engine)
        for output in engine.step():
            answers.setdefault((output.id, output.index), []).append(output)
        check_pages(engine)
        if step > 20 and not engine.has_work():
            break
    assert not engine.has_work()
    for i, (arrival, prompt, max_tokens, n, abort, wish) in enumerate(arrivals):
        alone = known[i]
        for index in range(n):
            got, expected = answers.get((str(i), index), []), alone["alone", index]
            if wish == "nothing":
                assert token_ids(expected) == greedy_reference(prompt, max_tokens)
            if abort is None or abort < arrival:
                assert token_ids(got) == token_ids(expected) and text(got) == text(expected)
                assert scores(got) == scores(expected)
                assert got[-1].finish_reason == expected[-1].finish_reason in ("stop", "length")
            elif got:
                assert token_ids(got) == token_ids(expected)[: len(token_ids(got))]
                assert got[-1].finish_reason is not None
            assert all(output.finish_reason is None for output in got[:-1])
    assert engine.stats().pages_free == num_pages
    engine.flush_cache()
    assert len(engine._kv._free) == num_pages
    assert not engine._kv._tree or len(engine._kv._tree) == 0


def wanted(max_tokens: int, n: int, wish: str) -> dict:
    made = {"max_tokens": max_tokens, "n": n, **WISHES[wish]}
    return made | {"min_tokens": min(made.get("min_tokens", 0), max_tokens)}


def scores(outputs: list) -> tuple[list, list]:
    """Log-probabilities of the prompt and of the answer."""
    prompt = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    return prompt, [entry for output in outputs for entry in output.logprobs or ()]


def test_a_preempted_prompt_is_scored_once_it_has_its_pages_again() -> None:
    """It is preempted half-way, and begins again in chunks that end before the first row without a score."""
    requests = [
        request("grows", [2, 3, 4, 5], max_tokens=40, ignore_eos=True),
        request("scored", [3, 4] * 30, prompt_logprobs=1, max_tokens=4, ignore_eos=True),
    ]
    expected = run(fake_engine(), *requests)
    engine = fake_engine(num_pages=65, page_size=1, max_step_tokens=16, radix_cache=False)
    got = run(engine, *requests)
    assert engine.stats().preemptions == 1
    assert {k: scores(v) for k, v in got.items()} == {k: scores(v) for k, v in expected.items()}
    assert {k: token_ids(v) for k, v in got.items()} == {k: token_ids(v) for k, v in expected.items()}


def test_preempted_sequences_answer_the_same() -> None:
    prompts = [[i + 2, 3, 4, 5, 6] for i in range(6)]
    requests = [request(str(i), prompt, max_tokens=30, ignore_eos=True) for i, prompt in enumerate(prompts)]
    roomy, tight = fake_engine(num_pages=64), fake_engine(num_pages=12)
    expected, got = run(roomy, *requests), run(tight, *requests)
    assert roomy.stats().preemptions == 0 and tight.stats().preemptions > 0
    assert {k: token_ids(v) for k, v in got.items()} == {k: token_ids(v) for k, v in expected.items()}
    assert {k: text(v) for k, v in got.items()} == {k: text(v) for k, v in expected.items()}


def test_prefix_cache_skips_work_and_changes_nothing() -> None:
    prompt = list(range(2, 32))
    answers, rows = {}, {}
    for radix in (True, False):
        model = FakeModel()
        engine = fake_engine(model, radix_cache=radix)
        first = run(engine, request("a", prompt))
        second = run(engine, request("b", prompt))
        answers[radix] = token_ids(first["a", 0]) + token_ids(second["b", 0])
        rows[radix] = model.rows_run
        assert second["b", 0][0].cached_tokens == (28 if radix else 0)
    assert answers[True] == answers[False]
    assert rows[True] == rows[False] - 28


def test_a_follow_up_turn_reuses_the_answer_too() -> None:
    engine = fake_engine()
    prompt = list(range(2, 12))
    answer = token_ids(run(engine, request("a", prompt, max_tokens=10, ignore_eos=True))["a", 0])
    turn = run(engine, request("b", prompt + answer + [9, 9]))
    assert turn["b", 0][0].cached_tokens == 16  # 19 tokens were computed: four whole pages of 4


@pytest.mark.parametrize("radix", [True, False])
def test_answers_of_one_request_share_the_prompt(radix: bool) -> None:
    model = FakeModel()
    engine = fake_engine(model, radix_cache=radix, max_step_tokens=64)
    prompt = list(range(2, 31))  # 29 tokens: seven whole pages and one token
    outputs = run(engine, request("a", prompt, n=4, max_tokens=2, temperature=1.0, seed=3, ignore_eos=True))
    assert len(outputs) == 4
    assert model.rows_run == 29 + 3 * 1 + 4  # the prompt once, its last token per answer, one decode row each
    assert [outputs["a", i][0].cached_tokens for i in range(4)] == [0, 28, 28, 28]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (29, 0)  # one prompt, of which nothing was cached


def test_prefix_eviction_is_least_recently_used() -> None:
    engine = fake_engine(num_pages=8)
    old, recent = [2] * 9, [3] * 9  # two whole pages each stay cached
    run(engine, request("old", old, max_tokens=1))
    run(engine, request("recent", recent, max_tokens=1))
    run(engine, request("big", [4] * 20, max_tokens=3))  # six pages: evicts two
    assert run(engine, request("x", recent, max_tokens=1))["x", 0][0].cached_tokens == 8
    assert run(engine, request("y", old, max_tokens=1))["y", 0][0].cached_tokens == 0


def test_prefill_does_not_hold_up_decoding() -> None:
    engine = fake_engine(max_step_tokens=8, num_pages=64)
    engine.add(request("short", [2, 3], max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add(request("long", [5] * 100))
    tokens_per_step = []
    for _ in range(10):
        tokens_per_step.append([o.id for o in engine.step()])
    assert all("short" in step for step in tokens_per_step)


def test_prompts_take_a_bounded_time_of_steps_that_others_wait_for() -> None:
    pace = PrefillPace(2048)
    assert pace.step_tokens(decoding=0) == 2048
    assert pace.step_tokens(decoding=3) == 3 + 128  # nothing is known yet
    pace.observe(tokens=1000, seconds=2.0)
    assert pace.step_tokens(decoding=3) == 3 + 125  # 500 tokens/s, a quarter of a second
    pace.observe(tokens=8, seconds=1.0)  # decoding only: says nothing about prompts
    assert pace.step_tokens(decoding=3) == 3 + 125
    pace.observe(tokens=100, seconds=100.0)
    pace.observe(tokens=100, seconds=100.0)
    pace.observe(tokens=100, seconds=100.0)
    pace.observe(tokens=100, seconds=100.0)
    assert pace.step_tokens(decoding=1) == 1 + 32


def test_a_step_in_which_experts_are_streamed_takes_as_long_for_any_rows() -> None:
    """What a long step alone shows says nothing about short ones, whose experts the CPU computes."""
    pace = PrefillPace(8192, streams=True)
    pace.observe(tokens=8192, seconds=0.3, shared=False)
    assert pace.step_tokens(decoding=2) == 2 + 128
    pace.observe(tokens=128, seconds=0.128)
    assert pace.step_tokens(decoding=2) == 2 + 250
    assert PrefillPace(8192, streams=True, whole_chunks=True).step_tokens(decoding=2) == 8192
    assert PrefillPace(16).step_tokens(decoding=5) == 16


def test_first_come_first_served() -> None:
    engine = fake_engine(max_running_requests=1)
    outputs_in_order = []
    for name in "abc":
        engine.add(request(name, [2, 3, 4], max_tokens=3, ignore_eos=True))
    while engine.has_work():
        outputs_in_order += [output.id for output in engine.step()]
    assert outputs_in_order == list("aaabbbccc")


def test_what_can_never_fit_is_refused_with_the_limit() -> None:
    engine = fake_engine(num_pages=10, context_length=100)  # 40 tokens of cache
    with pytest.raises(RequestError, match="max_total_tokens") as caught:
        engine.add(request("a", [2] * 30, max_tokens=11))
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestError, match="40"):
        engine.add(request("a", [2] * 40, max_tokens=1))
    with pytest.raises(RequestError, match="empty"):
        engine.add(request("a", []))
    with pytest.raises(RequestError, match="within 0 and 63"):
        engine.add(request("a", [64]))
    assert not engine.has_work()
    assert len(token_ids(run(engine, request("a", [2] * 30, max_tokens=10, ignore_eos=True))["a", 0])) == 10
    assert len(token_ids(run(engine, request("b", [2] * 30, max_tokens=None, ignore_eos=True))["b", 0])) == 10


def test_an_id_in_use_is_refused() -> None:
    engine = fake_engine()
    engine.add(request("a", [2]))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("a", [3]))


def test_abort_frees_pages_at_once_in_every_state() -> None:
    engine = fake_engine(num_pages=16, max_running_requests=3, radix_cache=False, max_step_tokens=6)
    engine.add(request("decoding", [2, 3], max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add(request("prefilling", [4] * 20, n=2))
    engine.add(request("queued", [5] * 30))
    engine.step()
    for name in ("queued", "prefilling", "decoding"):
        engine.abort(name)
        check_pages(engine)
    assert engine.stats().pages_free == 16
    assert sorted((o.id, o.index, o.finish_reason) for o in engine.step()) == [
        ("decoding", 0, "abort"), ("prefilling", 0, "abort"), ("prefilling", 1, "abort"), ("queued", 0, "abort"),
    ]  # fmt: skip
    assert not engine.has_work()
    engine.abort("unknown")
    assert not engine.has_work()


def test_abort_all() -> None:
    engine = fake_engine()
    for name in "abc":
        engine.add(request(name, [2, 3]))
    engine.abort("")
    assert {o.finish_reason for o in engine.step()} == {"abort"}
    assert engine.stats().aborted_requests == 3 and engine.stats().running == 0


def test_a_failing_step_fails_only_its_requests() -> None:
    model = FakeModel()
    engine = fake_engine(model)
    model.fail_on = {9}
    bad = run(engine, request("bad", [9, 9, 9]))
    assert bad["bad", 0][-1].finish_reason == "error" and "told to fail" in bad["bad", 0][-1].error
    check_pages(engine)
    assert engine.stats().pages_free == engine.stats().pages_total
    assert token_ids(run(engine, request("good", [2, 3]))["good", 0]) == greedy_reference([2, 3], 8)


def test_what_goes_wrong_after_tokens_are_chosen_costs_no_answer(monkeypatch) -> None:
    """Of them one ends in that step, so it cannot fail any more."""
    engine, looked = fake_engine(FakeModel()), list[str]()
    left = [ValueError("no counts")] * 8

    def fails(tokens: int) -> None:
        if left:
            raise left.pop()

    monkeypatch.setattr(engine._runner, "commit", fails)
    monkeypatch.setattr(engine._runner, "after_failure", lambda: looked.append("looked"))
    outputs = run(engine, request("ends", [2, 3], max_tokens=1), request("goes on", [2, 4]))
    assert token_ids(outputs["ends", 0]) == greedy_reference([2, 3], 1)
    assert token_ids(outputs["goes on", 0]) == greedy_reference([2, 4], 8)
    assert looked == ["looked"] * 8 and not left
    check_pages(engine)


class BrokenTokenizer(FakeTokenizer):
    """Cannot decode the token 40, also not when it is asked again."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if 40 in ids:
            raise ValueError("no text for token 40")
        return super().decode(ids, skip_special_tokens)


def test_a_failing_answer_leaves_the_others_of_its_step_alone() -> None:
    parts = EngineParts(fake_plan(), fake_config(), FakeModel(), BrokenTokenizer())
    engine = Engine.from_parts(parts)
    outputs = run(
        engine,
        request("good", [2, 3]),
        request("bad", [4, 5], logit_bias={40: 100.0}),
        request("late", [2, 4]),
    )
    assert [o.finish_reason for o in outputs["bad", 0]] == ["error"]
    assert "no text for token 40" in outputs["bad", 0][0].error
    for name, prompt in (("good", [2, 3]), ("late", [2, 4])):
        assert token_ids(outputs[name, 0]) == greedy_reference(prompt, 8)
        assert text(outputs[name, 0]) == FakeTokenizer().decode(greedy_reference(prompt, 8))
    check_pages(engine)
    assert engine.stats().pages_free == engine.stats().pages_total


def test_nan_logits_are_an_error_of_that_row_only() -> None:
    model = FakeModel()
    model.nan_on = {9}
    engine = fake_engine(model)
    outputs = run(engine, request("bad", [9] * 8), request("good", [2, 3]))
    assert outputs["bad", 0][-1].finish_reason == "error" and "NaN" in outputs["bad", 0][-1].error
    assert token_ids(outputs["good", 0]) == greedy_reference([2, 3], 8)
    assert engine.stats().pages_cached == 2  # of "good": 9 tokens; nothing of "bad" is kept


def test_nothing_of_a_long_prompt_with_nan_logits_is_found_again() -> None:
    """Its first chunks were findable while it ran."""
    model = FakeModel()
    model.nan_on = {9}
    engine = fake_engine(model, max_step_tokens=16)
    prompt = [9, *(3 + i % 5 for i in range(59))]
    for name in ("bad", "again"):
        answer = run(engine, request(name, prompt))[name, 0][-1]
        assert answer.finish_reason == "error" and answer.cached_tokens == 0
    check_pages(engine)
    assert engine.stats().pages_cached == 0


LONG, STEP = [3, 5, 7, 11] * 60, 16


def prefilled(engine: Engine) -> dict[str, int]:
    """Of one step: how many tokens of each prompt."""
    before = {s.request_id: s.computed_len for s in engine._scheduler.running}
    engine.step()
    now = {s.request_id: s.computed_len for s in engine._scheduler.running}
    return {name: now[name] - before.get(name, 0) for name in now}


def steps_to_first_token(engine: Engine, name: str) -> int:
    for steps in range(1, 200):
        if any(output.id == name and output.token_ids for output in engine.step()):
            return steps
    raise AssertionError(name)


def test_a_short_prompt_behind_a_long_one_takes_twice_its_own_time() -> None:
    engine = fake_engine(FakeModel(), num_pages=400, max_step_tokens=STEP, radix_cache=False)
    engine.add(request("long", LONG, max_tokens=1))
    assert prefilled(engine) == {"long": STEP}
    short = [13, 17, 19] * 10  # 30 tokens: two steps alone
    engine.add(request("short", short, max_tokens=1))
    assert prefilled(engine) == {"long": STEP // 2, "short": STEP // 2}
    assert steps_to_first_token(engine, "short") == 3
    assert engine._scheduler.running[0].computed_len >= STEP * 3
    answers = {name: token_ids(outputs) for (name, _), outputs in run(engine).items()}
    assert answers["long"] == greedy_reference(LONG, 1)
    check_pages(engine)


def test_one_short_prompt_after_another_leaves_a_long_one_its_half() -> None:
    engine = fake_engine(FakeModel(), num_pages=400, max_step_tokens=STEP, radix_cache=False)
    engine.add(request("long", LONG, max_tokens=1))
    steps = 0
    while engine.has_work() and steps < 100:
        if steps < 40:
            engine.add(request(f"s{steps}", [20 + steps % 40] * STEP, max_tokens=1))
        if any(output.id == "long" and output.token_ids for output in engine.step()):
            break
        steps += 1
    assert steps <= 2 * len(LONG) // STEP + 1


def test_equal_prompts_come_one_after_the_other() -> None:
    """Sharing would make the first one late, and the second one no sooner."""
    engine = fake_engine(FakeModel(), num_pages=400, max_step_tokens=STEP, radix_cache=False)
    for name in "ab":
        engine.add(request(name, [ord(name) % 60, *LONG[: 2 * STEP - 1]], max_tokens=1))
    assert [steps_to_first_token(engine, name) for name in "ab"] == [2, 2]


def test_no_more_is_admitted_than_a_step_can_share() -> None:
    engine = fake_engine(FakeModel(), num_pages=400, max_step_tokens=STEP, radix_cache=False)
    for name in "abcdef":
        engine.add(request(name, [ord(name) % 60, *LONG[: 3 * STEP]], max_tokens=1))
    engine.step()
    assert [s.request_id for s in engine._scheduler.running] == ["a", "b"]


def test_a_prompt_is_findable_chunk_by_chunk() -> None:
    """Another that begins alike takes up what is computed of it, long before it ends."""
    engine = fake_engine(max_step_tokens=16)
    prompt = [3 + i % 50 for i in range(60)]
    engine.add(request("a", prompt, max_tokens=1))
    engine.step()
    engine.step()
    assert len(engine._kv._tree.match(prompt, 60)) == 2 * 16 // 4
    engine.add(request("b", [*prompt[:32], 1, 2], max_tokens=1))
    outputs = run(engine)
    assert outputs["b", 0][0].cached_tokens == 32
    check_pages(engine)
