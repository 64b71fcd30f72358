"""Several tokens a step: draft tokens decide what is computed, never what is answered."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fake_model import (
    EOS,
    VOCAB,
    FakeModel,
    FakeTokenizer,
    check_pages,
    fake_config,
    fake_engine,
    fake_logits,
    fake_plan,
    foretold_engine,
    request,
    run,
    text,
    token_ids,
)
from kernel_cases import INVARIANT_TIER
from recorded_steps import tiny_engine
from tandem import LLM
from tandem.engine.engine import Engine
from tandem.engine.llm import Generation
from tandem.engine.protocol import GenerateRequest, Grammar, SamplingSettings
from tandem.engine.speculation.draft import Draft
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.loader import load_parts
from tandem.engine.start.parts import EngineParts
from tandem.engine.step.batch import BatchArrays
from tandem.experts.usage.usage_file import read_usage
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.speculation import SpeculationPlan

PROMPT = list(range(2, 9))


def test_the_made_up_drafter_is_right_as_often_as_wished() -> None:
    engine = fake_engine()
    engine.add(request("a", PROMPT, max_tokens=200, ignore_eos=True))
    engine.step()
    [sequence] = engine._scheduler.running
    for acceptance, least, most in ((0.0, 0, 0), (0.5, 80, 120), (1.0, 200, 200)):
        draft = OracleDrafter({("a", 0): [7] * 300}, acceptance, VOCAB).propose(sequence, 200)
        assert least <= sum(token == 7 for token in draft.tokens) <= most


def test_accepted_drafts_save_steps_and_rejected_ones_cost_none() -> None:
    ask = request("a", PROMPT, max_tokens=40, ignore_eos=True)
    plain = fake_engine()
    expected = run(plain, ask)
    answer = {("a", 0): token_ids(expected["a", 0])}
    steps = {}
    for acceptance in (0.0, 0.5, 1.0):
        engine = foretold_engine(answer, acceptance)
        got = run(engine, ask)
        assert token_ids(got["a", 0]) == answer["a", 0] and text(got["a", 0]) == text(expected["a", 0])
        steps[acceptance] = engine.stats().steps
    assert steps[0.0] == plain.stats().steps == 40
    assert steps[1.0] == 1 + 39 // 5 + 1  # the prompt, then five tokens a step, and four in the last
    assert steps[1.0] < steps[0.5] < steps[0.0]


def test_what_a_step_brings_is_one_output() -> None:
    ask = request("a", PROMPT, max_tokens=11, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    expected = run(fake_engine(), ask)["a", 0]
    got = run(foretold_engine({("a", 0): token_ids(expected)}, 1.0), ask)["a", 0]
    assert [len(output.token_ids) for output in got] == [1, 5, 5]
    assert [each for output in got for each in output.logprobs] == [o.logprobs[0] for o in expected]
    assert got[0].prompt_logprobs == expected[0].prompt_logprobs
    assert [output.completion_tokens for output in got] == [1, 6, 11]
    assert [output.finish_reason for output in got] == [None, None, "length"]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_the_prefix_tree_holds_accepted_tokens_only(acceptance: float) -> None:
    """A follow-up finds what a plain run would have left, and no page of a rejected draft token."""
    ask = request("a", PROMPT, max_tokens=21, ignore_eos=True)
    plain = fake_engine()
    answer = token_ids(run(plain, ask)["a", 0])
    engine = foretold_engine({("a", 0): answer}, acceptance)
    run(engine, ask)
    assert set(trie(engine)) == set(trie(plain)) and len(trie(engine)) == (len(PROMPT) + 20) // 4
    again = request("b", PROMPT + answer + [9])
    assert run(engine, again)["b", 0][0].cached_tokens == run(plain, again)["b", 0][0].cached_tokens > 0


def trie(engine: Engine) -> list[tuple[int, ...]]:
    return [node.key for node in engine._kv._tree._node_of_page.values()]


def test_nobody_loses_a_page_for_a_draft() -> None:
    """Both answers fit the cache exactly; draft tokens would need more, and are not made then."""
    asks = [request(name, PROMPT, max_tokens=17, ignore_eos=True) for name in "ab"]  # 24 tokens: 6 pages each
    plain = {key: token_ids(outputs) for key, outputs in run(fake_engine(), *asks).items()}
    engine = foretold_engine(plain, 0.0, num_pages=12, most=8, radix_cache=False)
    got = run(engine, *asks)
    assert {key: token_ids(outputs) for key, outputs in got.items()} == plain
    assert engine.stats().preemptions == 0
    check_pages(engine)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_preempted_sequences_answer_the_same(acceptance: float) -> None:
    asks = [request(str(i), [i + 2, 3, 4, 5, 6], max_tokens=30, ignore_eos=True) for i in range(6)]
    plain = {key: token_ids(outputs) for key, outputs in run(fake_engine(), *asks).items()}
    engine = foretold_engine(plain, acceptance, num_pages=12)
    assert {key: token_ids(outputs) for key, outputs in run(engine, *asks).items()} == plain
    assert engine.stats().preemptions > 0 and engine.stats().speculation.draft_tokens > 0
    check_pages(engine)


def test_rows_of_drafts_are_limited_together() -> None:
    asks = [request(str(i), [i + 2, 3], max_tokens=20, ignore_eos=True) for i in range(6)]
    plain = {key: token_ids(outputs) for key, outputs in run(fake_engine(), *asks).items()}
    model = FakeModel()
    parts = EngineParts(
        fake_plan(speculation=SpeculationPlan("made up", 8, False), max_step_tokens=16), fake_config(), model,
        FakeTokenizer(), drafter=OracleDrafter(plain, 1.0, VOCAB),
    )  # fmt: skip
    engine = Engine.from_parts(parts)
    for ask in asks:
        engine.add(ask)
    most, seen = 0, defaultdict(list)
    while engine.has_work():
        before = model.rows_run
        for output in engine.step():
            seen[output.id, output.index] += output.token_ids
        most = max(most, model.rows_run - before)
    assert most == 16 and seen == plain


def test_a_prompt_s_step_has_no_drafts() -> None:
    answer = {("a", 0): token_ids(run(fake_engine(), request("a", PROMPT, max_tokens=60, ignore_eos=True))["a", 0])}
    engine = foretold_engine(answer, 1.0, max_step_tokens=8)
    engine.add(request("a", PROMPT, max_tokens=60, ignore_eos=True))
    while engine.stats().generated_tokens < 11:
        engine.step()
    engine.add(request("b", [5] * 40))
    widths = []
    while engine._scheduler.waiting or any(s.pending_len > 1 for s in engine._scheduler.running):
        widths += [len(output.token_ids) for output in engine.step() if output.id == "a"]
    assert set(widths) == {1} and len(widths) >= 5


def test_one_seed_gives_one_answer_at_any_width_in_any_batch() -> None:
    asks = [request(str(i), [i + 2, 3], max_tokens=20, n=2, temperature=1.0, seed=i, ignore_eos=True, logprobs=1)
            for i in range(4)]  # fmt: skip
    expected = run(fake_engine(), *asks)
    plain = {key: token_ids(outputs) for key, outputs in expected.items()}
    assert len({tuple(answer) for answer in plain.values()}) == 8
    for width, acceptance, together in ((1, 0.5, 4), (3, 0.7, 2), (8, 0.5, 1), (8, 1.0, 4), (2, 0.0, 3)):
        engine, got = foretold_engine(plain, acceptance, most=width), {}
        for first in range(0, 4, together):
            got |= run(engine, *asks[first : first + together])
        assert scores(got) == scores(expected) and engine.stats().speculation.draft_tokens > 0


class Likeliest:
    """Drafts what is most probable, whatever is drawn."""

    def propose(self, sequence, most: int) -> Draft:
        tokens = list(sequence.tokens)
        for _ in range(most):
            tokens.append(int(fake_logits(tokens).argmax()))
        return Draft(tuple(tokens[len(tokens) - most :]), (1,) * most)

    def forget(self, sequence) -> None:
        pass


def test_draws_follow_the_distribution_whatever_was_drafted() -> None:
    """Chi-square of three tokens out of four likeliest each, 4,000 answers: 64 kinds, of which rare ones count
    together. The 0.9999 quantile with 63 degrees of freedom is 114; fewer kinds have a lower one."""
    asks = [request(str(i), [5, 6], max_tokens=3, temperature=1.0, top_k=4, seed=i, ignore_eos=True)
            for i in range(4000)]  # fmt: skip
    wanted = SpeculationPlan("made up", 2, False)
    engine = fake_engine(drafter=Likeliest(), speculation=wanted, max_running_requests=16, max_step_tokens=64)
    counts = Counter(tuple(token_ids(outputs)) for outputs in run(engine, *asks).values())
    said, chances = engine.stats().speculation, chances_of([5, 6], 3)
    assert 0.2 * said.draft_tokens < said.accepted_tokens < 0.8 * said.draft_tokens
    assert set(counts) <= set(chances)
    common = [kind for kind in chances if chances[kind] * len(asks) >= 5]
    cells = [(counts[kind], chances[kind] * len(asks)) for kind in common]
    rest = len(asks) - sum(seen for seen, _ in cells), len(asks) - sum(expected for _, expected in cells)
    cells += [rest] if rest[1] >= 5 else []
    assert len(cells) > 15 and sum((seen - expected) ** 2 / expected for seen, expected in cells) < 114


def chances_of(tokens: list[int], more: int) -> dict[tuple[int, ...], float]:
    """Of all ways to go on with the four likeliest tokens."""
    if more == 0:
        return {(): 1.0}
    logits = fake_logits(tokens).astype(np.float64)
    best = np.argsort(-logits)[:4]
    shares = np.exp(logits[best]) / np.exp(logits[best]).sum()
    found: dict[tuple[int, ...], float] = {}
    for token, share in zip(best.tolist(), shares.tolist(), strict=True):
        found |= {(token, *rest): share * chance for rest, chance in chances_of([*tokens, token], more - 1).items()}
    return found


def test_nothing_comes_behind_an_end_that_was_drafted() -> None:
    """End tokens, stop tokens and the limit lie inside a step whose other draft tokens are accepted, too."""
    wishes = {"eos": {"logit_bias": {EOS: 5.0}}, "stop": {"stop_token_ids": tuple(range(20, 30))}, "limit": {}}
    asks = [request(f"{wish}{i}", [i + 2, 3], max_tokens=23, temperature=1.0, seed=i, **more)
            for wish, more in wishes.items() for i in range(8)]  # fmt: skip
    expected = run(fake_engine(), *asks)
    known = {key: token_ids(outputs) + [7] * 9 for key, outputs in expected.items()}
    engine = foretold_engine(known, 1.0, most=8)
    got = run(engine, *asks)
    for key, outputs in expected.items():
        assert token_ids(got[key]) == token_ids(outputs) and text(got[key]) == text(outputs)
        last, theirs = got[key][-1], outputs[-1]
        assert (last.finish_reason, last.stop_match) == (theirs.finish_reason, theirs.stop_match)
    assert {outputs[-1].finish_reason for outputs in got.values()} == {"stop", "length"}
    assert engine.stats().generated_tokens == sum(len(token_ids(outputs)) for outputs in expected.values())
    assert set(trie(engine)) <= trie_of(expected, asks)
    check_pages(engine)


def trie_of(answers: dict, asks: list) -> set[tuple[int, ...]]:
    """Whole pages of prompts and answers."""
    texts = [[*ask.prompt_ids, *token_ids(answers[ask.id, 0])] for ask in asks]
    return {tuple(tokens[i : i + 4]) for tokens in texts for i in range(0, len(tokens) - 3, 4)}


class FailingTurns(FakeModel):
    """Its logits of a draft token's row are no numbers."""

    def forward(self, batch, kv):
        logits = super().forward(batch, kv)
        if len(batch.input_ids) > len(batch.seq_lens) == len(batch.logits_rows) - 4:
            logits[2] = np.nan
        return logits


def test_bad_logits_of_a_draft_end_the_answer_where_they_would_have() -> None:
    ask = request("a", PROMPT, max_tokens=30, ignore_eos=True)
    plain = token_ids(run(fake_engine(), ask)["a", 0])
    parts = EngineParts(
        fake_plan(speculation=SpeculationPlan("made up", 4, False)), fake_config(), FailingTurns(),
        FakeTokenizer(), drafter=OracleDrafter({("a", 0): plain}, 1.0, VOCAB),
    )  # fmt: skip
    engine = Engine.from_parts(parts)
    outputs = run(engine, ask)["a", 0]
    assert outputs[-1].finish_reason == "error" and "NaN" in outputs[-1].error
    assert token_ids(outputs) == plain[:3]  # the prompt's, and two before the row that has none
    check_pages(engine)
    assert engine.stats().pages_free == engine.stats().pages_total


def test_a_failing_choice_fails_only_those_that_wait_for_it(monkeypatch) -> None:
    """One answer ends with its first token of the step. The other's second cannot be chosen."""
    asks = [
        request("ends", [2, 3], max_tokens=2, ignore_eos=True),
        request("fails", [4, 5], max_tokens=9, ignore_eos=True),
    ]
    plain = {key: token_ids(outputs) for key, outputs in run(fake_engine(), *asks).items()}
    engine = foretold_engine(plain, 1.0)
    from tandem.engine.sampling.logits import HostLogits

    choose = HostLogits.chosen

    def failing(self, rows, sequences, eos_ids, masks=()):
        if len(sequences) == 1 and sequences[0].answer_len == 2:
            raise RuntimeError("no choice")
        return choose(self, rows, sequences, eos_ids, masks)

    monkeypatch.setattr(HostLogits, "chosen", failing)
    got = run(engine, *asks)
    assert token_ids(got["ends", 0]) == plain["ends", 0] and got["ends", 0][-1].finish_reason == "length"
    assert got["fails", 0][-1].finish_reason == "error" and "no choice" in got["fails", 0][-1].error
    assert token_ids(got["fails", 0]) == plain["fails", 0][:2]
    check_pages(engine)
    assert not engine.has_work()


# -- a model with experts ---


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_rejected_drafts_count_nowhere(tiny_models, tmp_path: Path, acceptance: float) -> None:
    """Counts and records of experts are those of a run without drafts, token by token."""
    path = tiny_models["qwen3_moe"]
    records, stats = [], []
    answers: dict[tuple[str, int], list[int]] = {}
    for speculative in (False, True):
        engine = tiny_engine(path, tmp_path, expert_distribution_recorder_mode="per_token",
                             speculative_algorithm="NGRAM")  # fmt: skip
        wanted = SpeculationPlan("made up", 3, False) if speculative else None
        parts = replace(engine_parts(engine), plan=replace(engine.plan, speculation=wanted))
        engine = Engine.from_parts(replace(parts, drafter=OracleDrafter(answers, acceptance, 256)))
        engine.record_experts("start").result()
        got = run(engine, *(request(name, prompt, max_tokens=12, ignore_eos=True)
                            for name, prompt in (("0", [7, 8, 9]), ("1", [40] * 6))))  # fmt: skip
        answers = {key: token_ids(outputs) for key, outputs in got.items()} if not speculative else answers
        assert {key: token_ids(outputs) for key, outputs in got.items()} == answers
        records.append(read_usage(Path(engine.record_experts("dump").result(60).file)))
        stats.append(engine.stats())
    plain, drafted = records
    assert sorted(rows_of(plain)) == sorted(rows_of(drafted))
    assert drafted.tokens == plain.tokens
    assert (drafted.counts.sum(0) == plain.counts.sum(0)).all()
    assert stats[0].experts.cpu_tokens == stats[1].experts.cpu_tokens
    assert (stats[1].speculation.draft_tokens > 0) and stats[1].steps <= stats[0].steps


def test_a_step_s_distinct_experts_are_read_once(tiny_models, tmp_path: Path) -> None:
    """Bytes of a step with drafts are those of the union of what its rows have chosen, layer by layer."""
    engine = tiny_engine(tiny_models["qwen3_moe"], tmp_path, expert_distribution_recorder_mode="per_token",
                         speculative_algorithm="NGRAM")  # fmt: skip
    prompts = {"a": [7, 8, 9], "b": [40] * 6}
    asks = [request(name, prompt, max_tokens=13, ignore_eos=True) for name, prompt in prompts.items()]
    parts = replace(engine_parts(engine), plan=replace(engine.plan, speculation=SpeculationPlan("made up", 3, False)))
    answers = {key: token_ids(outputs) for key, outputs in run(engine, *asks).items()}
    engine = Engine.from_parts(replace(parts, drafter=OracleDrafter(answers, 1.0, 256)))
    before, spans, run_model = engine.stats().experts.cpu_bytes, [], engine._runner.start
    engine.record_experts("start").result()

    def noted(step, *rest):
        spans.append([(c.sequence.arrival[0], c.sequence.computed_len, c.length) for c in step.chunks])
        return run_model(step, *rest)

    engine._runner.start = noted
    run(engine, *asks)
    record = read_usage(Path(engine.record_experts("dump").result(60).file))
    chosen = {(r, p): ids for r, p, ids in zip(record.requests.tolist(), record.positions.tolist(),
                                               record.topk_ids, strict=True)}  # fmt: skip
    steps = [[chosen[name, first + i] for name, first, length in span for i in range(length)] for span in spans]
    layers = range(len(before))
    union = [sum(len({int(e) for ids in step for e in ids[layer]}) for step in steps) for layer in layers]
    rows = [sum(len(ids[layer]) for step in steps for ids in step) for layer in layers]
    read = [after - early for after, early in zip(engine.stats().experts.cpu_bytes, before, strict=True)]
    assert engine.stats().speculation.accepted_tokens > 8
    each = engine._runner._usage.expert_bytes.tolist()
    assert read == [count * nbytes for count, nbytes in zip(union, each, strict=True)]
    assert 2 * sum(union) < sum(rows)


def engine_parts(engine: Engine) -> EngineParts:
    runner = engine._runner
    return EngineParts(
        engine.plan, engine.model_config, runner._model, engine.tokenizer, engine._workers, runner._usage,
        engine._recorder,
    )  # fmt: skip


def rows_of(record) -> list[tuple]:
    """(request, position, ids of all layers) of every token."""
    requests, positions = record.requests.tolist(), record.positions.tolist()
    return [(r, p, str(ids)) for r, p, ids in zip(requests, positions, record.topk_ids.tolist(), strict=True)]


FAMILIES = (
    "glm4_moe", "deepseek_v3", "deepseek_v32", "gpt_oss", "mixtral-window", "qwen2_moe-window", "olmoe-clip", "llama",
    "mimo_v2_flash", "gemma4_text", "qwen3_next", "qwen3_5_moe_text", "deepseek_v4", "deepseek_v4-every",
)  # fmt: skip


@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family_answers_the_same_bits(tiny_models, tmp_path: Path, variant: str) -> None:
    """Windows, latents, indexers, sinks, delta nets; answers longer than the windows. Half the draft tokens are
    accepted."""
    engine = tiny_engine(
        tiny_models[variant], tmp_path, speculative_algorithm="NGRAM", kernel_tier=INVARIANT_TIER,
        disable_speculative_governor=True,
    )  # fmt: skip
    asks = [
        request(name, prompt, max_tokens=30, ignore_eos=True, logprobs=3)
        for name, prompt in (("a", [7, 8, 9, 7, 8]), ("b", [40] * 20))
    ]
    parts = engine_parts(engine)
    plain = run(Engine.from_parts(replace(parts, plan=replace(parts.plan, speculation=None))), *asks)
    answers = {key: token_ids(outputs) for key, outputs in plain.items()}
    foretold = OracleDrafter(answers, 0.5, parts.model_config.vocab)
    for drafter in (None, foretold):
        speculative = Engine.from_parts(replace(parts, drafter=drafter))
        assert scores(run(speculative, *asks)) == scores(plain)
        assert speculative.stats().speculation.draft_tokens > 0 or drafter is None


@pytest.mark.parametrize(
    ("variant", "acceptance"),
    [
        pytest.param(variant, share, marks=() if share == 0.5 or variant == "lfm2_moe" else pytest.mark.full)
        for variant in ("deepseek_v4", "lfm2_moe", "qwen3_next", "kimi_linear", "glm5_next")
        for share in (0.0, 0.5, 1.0)
    ],
)
def test_what_lies_in_slots_is_taken_back(tiny_models, tmp_path: Path, variant: str, acceptance: float) -> None:
    """Bit for bit, where prefixes are found at snapshots, and where sequences lose their slots."""
    flags = {"speculative_algorithm": "NGRAM", "kernel_tier": INVARIANT_TIER, "page_size": 8,
             "disable_speculative_governor": True}  # fmt: skip
    prompts = [[(7 * i + s) % 250 for i in range(26)] for s in range(3)]
    calls = [[request(f"{tail}{s}", [*prompt, *range(tail)], max_tokens=30, ignore_eos=True, logprobs=1)
              for s, prompt in enumerate(prompts)] for tail in (1, 5)]  # fmt: skip
    told, preempted, found = [], [], []
    answers: dict[tuple[str, int], list[int]] = {}
    for tokens, speculative in ((512, False), (512, True), (120, True)):
        engine = tiny_engine(tiny_models[variant], tmp_path, max_total_tokens=tokens, context_length=96, **flags)
        parts = engine_parts(engine)
        plan = parts.plan if speculative else replace(parts.plan, speculation=None)
        engine = Engine.from_parts(replace(parts, plan=plan, drafter=OracleDrafter(answers, acceptance, 256)))
        got = {key: outputs for call in calls for key, outputs in run(engine, *call).items()}
        answers = answers or {key: token_ids(outputs) for key, outputs in got.items()}
        told.append(scores(got))
        preempted.append(engine.stats().preemptions)
        found.append(engine.stats().cached_tokens)
        assert not speculative or engine.stats().speculation.draft_tokens > 0
    assert told[1] == told[0] and told[2] == told[0]
    assert preempted[:2] == [0, 0] and preempted[2] > 0 and found[1] >= 3 * 24


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v32", "gpt_oss", "mixtral-window"])
def test_rows_that_are_sequences_of_their_own_answer_the_same(
    tiny_models, tmp_path: Path, variant: str, acceptance: float
) -> None:
    """As a GPU has them in its graphs, here on the CPU."""
    engine = tiny_engine(
        tiny_models[variant], tmp_path, speculative_algorithm="NGRAM", kernel_tier=INVARIANT_TIER,
        disable_speculative_governor=True, expert_distribution_recorder_mode="per_token",
    )  # fmt: skip
    asks = [request(name, prompt, max_tokens=30, ignore_eos=True, logprobs=3)
            for name, prompt in (("a", [7, 8, 9, 7, 8]), ("b", [40] * 20))]  # fmt: skip
    parts = engine_parts(engine)
    apart = BatchArrays(engine.plan.page_size, engine.plan.max_step_tokens, row_per_sequence=True)
    plain = Engine.from_parts(replace(parts, plan=replace(parts.plan, speculation=None)))
    expected = run(plain, *asks)
    answers = {key: token_ids(outputs) for key, outputs in expected.items()}
    counted = plain.stats().experts.cpu_tokens
    speculative = Engine.from_parts(
        replace(parts, drafter=OracleDrafter(answers, acceptance, parts.model_config.vocab))
    )
    speculative._runner._arrays = apart
    assert scores(run(speculative, *asks)) == scores(expected)
    assert speculative.stats().speculation.draft_tokens > 0
    assert [2 * n for n in counted] == speculative.stats().experts.cpu_tokens  # both runs, no rejected draft token


def scores(answers: dict) -> dict:
    return {key: [each for output in outputs for each in output.logprobs] for key, outputs in answers.items()}


# -- the demo model ---

ASKED = [
    "Repeat exactly: one two three four five six seven eight one two three four five six seven eight",
    "Why is the sky blue?",
]
WISHES = {
    "greedy": {"temperature": 0.0, "logprobs": 1, "ignore_eos": True},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "seed": 11, "n": 2, "ignore_eos": True},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
        "min_tokens": 20, "ignore_eos": True},
    "narrow": {"temperature": 0.9, "seed": 2, "dry_multiplier": 0.8,
        "xtc_probability": 0.4, "min_p": 0.05, "ignore_eos": True},
    "grammar": {"temperature": 0.0, "grammar": Grammar("regex", r"([a-z]+ ){8}[a-z]+\.")},
    "stops": {"temperature": 0.0, "stop": ("five", "er "), "logit_bias": {284: 1.0}},
}


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    """AMX promises no equal bits, so it is left out."""
    flags = {"max_total_tokens": 4096, "max_running_requests": 8, "kernel_tier": INVARIANT_TIER, "device": "cpu"}
    return load_parts(EngineConfig(model="demo", speculative_algorithm="NGRAM", **flags))


@pytest.fixture(scope="module")
def plain(parts) -> dict[str, list[Generation]]:
    return {wish: ask(parts, wish)[0] for wish in WISHES}


def ask(parts: EngineParts, wish: str, **plan) -> tuple[list[Generation], Engine]:
    engine = Engine.from_parts(replace(parts, plan=replace(parts.plan, **{"speculation": None} | plan)))
    params = SamplingSettings(max_tokens=24, **WISHES[wish])
    asked = [[{"role": "user", "content": each}] for each in ASKED]
    return LLM.from_engine(engine).chat(asked, params, progress=False), engine


def told(results: list[Generation]) -> list:
    return [(a.text, a.token_ids, a.logprobs, a.finish_reason, a.stop_match) for r in results for a in r.answers]


WAYS = {  # acceptance of a drafter that knows the answer, None: NGRAM; and changes to the plan
    "NGRAM": (None, {}),
    "half right": (0.5, {}),
    "tight": (0.8, {"num_pages": 8, "max_step_tokens": 16, "radix_cache": False}),
}


@pytest.mark.parametrize(
    ("way", "wish"),
    [
        pytest.param(way, wish, marks=() if way == "half right" or wish == "greedy" else pytest.mark.full)
        for way in WAYS
        for wish in sorted(WISHES)
    ],
)
def test_the_demo_model_answers_the_same_bits(parts, plain, wish: str, way: str) -> None:
    """Tokens, texts, log-probabilities and reasons."""
    acceptance, changes = WAYS[way]
    expected = plain[wish]
    answers = {(str(i), n): a.token_ids for i, r in enumerate(expected, 1) for n, a in enumerate(r.answers)}
    drafter = None if acceptance is None else OracleDrafter(answers, acceptance, parts.model_config.vocab)
    wanted = SpeculationPlan("NGRAM", 7, governed=False)
    got, engine = ask(replace(parts, drafter=drafter), wish, speculation=wanted, **changes)
    assert told(got) == told(expected)
    stats = engine.stats()
    if drafter is not None:
        assert 0 < stats.speculation.accepted_tokens < stats.speculation.draft_tokens


def test_recorded_steps_do_not_depend_on_whose_their_rows_are(parts) -> None:
    """Eight rows of one sequence and one row of each of eight replay the same recording."""
    llm = LLM.from_engine(
        Engine.from_parts(replace(parts, plan=replace(parts.plan, speculation=SpeculationPlan("NGRAM", 7, False))))
    )
    crowd = [[{"role": "user", "content": f"{ASKED[0]} {i}"}] for i in range(8)]
    params = SamplingSettings(max_tokens=24, temperature=0.0, logprobs=1)
    model = llm.engine._runner._model
    first = llm.chat(crowd[:1], params, progress=False)
    assert 8 in model._recorded
    llm.chat(crowd, params, progress=False)
    again = llm.chat(crowd[:1], params, progress=False)
    assert [(r.token_ids, r.logprobs) for r in again] == [(r.token_ids, r.logprobs) for r in first]


def test_stats_say_what_was_gained(parts) -> None:
    engine = Engine.from_parts(replace(parts, plan=replace(parts.plan, speculation=SpeculationPlan("NGRAM", 7, False))))
    prompt = engine.tokenizer.encode("a b c d e f g h " * 6)
    engine.add(GenerateRequest(id="a", prompt_ids=prompt, sampling=SamplingSettings(temperature=0.0, max_tokens=40)))
    while engine.has_work():
        engine.step()
    said = engine.stats().speculation
    assert (said.algorithm, said.governed, said.most) == ("NGRAM", False, 7)
    assert 0 < said.accepted_tokens <= said.draft_tokens
    assert sum(said.widths) == said.steps and sum(i * n for i, n in enumerate(said.widths)) == said.draft_tokens
    assert said.draft_step_tokens == said.accepted_tokens + said.draft_steps
