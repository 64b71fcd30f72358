"""An engine of two ranks answers as one of one rank: through prefixes, snapshots, windows, preemptions and aborts."""

from __future__ import annotations

import msgspec
import pytest

from ranked_engine import ranked_engine
from tandem import LLM, SamplingParams
from tandem.engine.pace import PrefillPace
from tandem.engine.protocol import Grammar
from tandem.engine.ranks.messages import StepList
from tandem.engine.step.batch import MANY_SINGLE
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(len(Machine.detect_cpus().cores) < 2, reason="a rank needs a core")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
START = [70 + i % 40 for i in range(37)]
CALLS = [  # in turn: begin alike, longer, shorter, all at once
    [START, START[:21], [5], START[::-1]],
    [[*START, 9, 8, 7], START[:30], [*START[:25], 3, 3], [11] * 40],
]
FLAGS = {"device": "cpu", "dtype": "float32", "page_size": 4, "kt_cpuinfer": 2, "chunked_prefill_size": 16}


def answered(llm: LLM) -> list[list[int]]:
    return [one.token_ids for call in CALLS for one in llm.generate(call, GREEDY, progress=False)]


VARIANTS = {
    "glm4_moe": {}, "qwen3_next": {}, "mixtral-window": {}, "deepseek_v4-every": {}, "deepseek_v3-plain": {},
    "olmoe": {}, "bailing_hybrid-plain": {}, "glm5_next-pools": {}, "qwen4_exp": {},
    "qwen2_moe": {"max_total_tokens": 128, "max_running_requests": 4},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_of_one_rank(tiny_models, tmp_path, variant, monkeypatch) -> None:
    monkeypatch.setattr(PrefillPace, "slice_seconds", lambda *_: 1e9)  # preemptions do not depend on timing then
    path, flags = str(tiny_models[variant]), FLAGS | VARIANTS[variant]
    alone = LLM(path, **flags)
    with ranked_engine(EngineConfig.from_keywords(path, tp=2, **flags), tmp_path) as (engine, _):
        assert answered(LLM.from_engine(engine)) == answered(alone)
        stats = engine.stats()
        assert stats.cached_tokens == alone.engine.stats().cached_tokens > 0
        assert (stats.preemptions > 0) == ("max_total_tokens" in flags)


@pytest.mark.parametrize("variant", ["glm4_moe", "qwen3_next", "mixtral-window"])
def test_ranks_put_many_rows_together_array_by_array(tiny_models, tmp_path, variant) -> None:
    """As one rank does, from what the list says of each."""
    prompts = [START[i : i + 9] for i in range(MANY_SINGLE + 2)]
    path = str(tiny_models[variant])
    expected = [one.token_ids for one in LLM(path, **FLAGS).generate(prompts, GREEDY, progress=False)]
    with ranked_engine(EngineConfig.from_keywords(path, tp=2, **FLAGS), tmp_path) as (engine, (other,)):
        found = LLM.from_engine(engine).generate(prompts, GREEDY, progress=False)
    assert [one.token_ids for one in found] == expected
    steps = [msgspec.msgpack.decode(data, type=StepList) for data in other.steps]
    assert any(len(step.rows) == len(prompts) and all(len(rows.tokens) == 1 for rows in step.rows) for step in steps)


REPEATED = [[*range(40, 52)] * 3, [7, 8, 9] * 8, [60, 61] * 12]


@pytest.mark.parametrize("variant", [
    "glm4_moe", "qwen3_next", "mixtral-window", "deepseek_v4-every", "bailing_hybrid-plain",
    "glm5_next-pools", "qwen4_exp",
])  # fmt: skip
def test_drafts_of_n_grams_are_computed_by_all_ranks(tiny_models, tmp_path, variant) -> None:
    """Wrong ones are dropped on all alike: later tokens are those without drafts."""
    path, drafts = str(tiny_models[variant]), {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    few = dict.fromkeys(range(40, 44), 20.0)  # tokens to choose from, so that drafts come true now and then
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias=few)
    expected = [one.token_ids for one in LLM(path, **FLAGS).generate(REPEATED, long, progress=False)]
    with ranked_engine(EngineConfig.from_keywords(path, tp=2, **FLAGS, **drafts), tmp_path) as (engine, (other,)):
        found = LLM.from_engine(engine).generate(REPEATED, long, progress=False)
    assert [one.token_ids for one in found] == expected
    steps = [msgspec.msgpack.decode(data, type=StepList) for data in other.steps]
    assert sum(rows.draft_tokens for step in steps for rows in step.rows) > 0


def test_answers_with_a_grammar_are_those_of_one_rank(tiny_models, tmp_path) -> None:
    """The first rank alone chooses tokens."""
    path = str(tiny_models["qwen3_moe"])
    sampling = SamplingParams(temperature=0.0, max_tokens=16, grammar=Grammar("regex", "[a-m]+"))
    expected = LLM(path, **FLAGS).generate([START], sampling, progress=False)[0].token_ids
    with ranked_engine(EngineConfig.from_keywords(path, tp=2, **FLAGS), tmp_path) as (engine, _):
        assert LLM.from_engine(engine).generate([START], sampling, progress=False)[0].token_ids == expected


def test_lists_name_what_has_changed(tiny_models, tmp_path) -> None:
    """Of a sequence that decodes: one token, and a page when one is full. One that has ended is named once."""
    config = EngineConfig.from_keywords(str(tiny_models["qwen3_moe"]), tp=2, **FLAGS)
    with ranked_engine(config, tmp_path) as (engine, (other,)):
        llm = LLM.from_engine(engine)
        llm.generate([START[:9]], GREEDY, progress=False)
        llm.generate([[1, 2, 3]], GREEDY, progress=False)
    steps = [msgspec.msgpack.decode(data, type=StepList) for data in other.steps]
    first, *decoding = [rows for step in steps for rows in step.rows if rows.sequence == 1]
    assert first.tokens == START[:9] and [place for place, _ in first.pages] == [0, 1, 2]
    assert all(len(rows.tokens) == 1 for rows in decoding)
    assert sum(len(rows.pages) for rows in decoding) == 2  # 9 and 11 more tokens, four to a page
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [number for step in steps for number in step.ended] == [1]
    assert max(map(len, other.steps)) < 100


def test_a_rank_that_fails_ends_the_engine(tiny_models, tmp_path) -> None:
    """Its ranks would not meet again: no later step may run."""
    config = EngineConfig.from_keywords(str(tiny_models["qwen3_moe"]), tp=2, **FLAGS)
    with ranked_engine(config, tmp_path) as (engine, (other,)):
        llm = LLM.from_engine(engine)
        assert llm.generate([[1, 2]], GREEDY, progress=False)
        engine._runner._leader.lists._steps += 1  # as if a list had been lost
        with pytest.raises(Exception, match="would not meet again"):
            llm.generate([[1, 2, 3]], GREEDY, progress=False)
    assert "step" in other.failed


def test_the_first_rank_alone_reads_the_tokenizer(tiny_models, tmp_path, monkeypatch) -> None:
    """A large one takes some 100 MiB, and every other rank would have a copy."""
    read, load = list[str](), Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda path: read.append(str(path)) or load(path))
    path = str(tiny_models["qwen3_moe"])
    with ranked_engine(EngineConfig.from_keywords(path, tp=2, **FLAGS), tmp_path) as (engine, _):
        assert LLM.from_engine(engine).generate([[1, 2]], GREEDY, progress=False)
    assert read == [path]


def test_ranks_are_a_servers(tiny_models) -> None:
    with pytest.raises(ConfigError, match="ranks are processes of `kt serve`; leave --tp out"):
        LLM(str(tiny_models["qwen3_moe"]), tp=2, **FLAGS)
