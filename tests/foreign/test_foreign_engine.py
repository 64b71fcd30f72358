"""The whole engine around Transformers' modules: greedy text, company, chunks, shared prefixes, preemption."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from foreign_models import ALONE, PAGED, ForeignModels
from tandem import LLM, SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.speculation.draft import Drafter
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.loader import load_parts
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.speculation import SpeculationPlan
from tandem.spec.model_config import why_alone
from tiny import VOCAB

ANSWER = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="session")
def foreign_models(tmp_path_factory):
    return ForeignModels(tmp_path_factory.mktemp("foreign"))


@cache
def parts(path):
    flags = {"device": "cpu", "dtype": "float32", "page_size": 4, "speculative_algorithm": "NGRAM"}
    return load_parts(EngineConfig(model=str(path), **flags))


def llm(path, drafter: Drafter | None = None, **plan) -> LLM:
    """Without drafts, unless `speculation` is named."""
    loaded = parts(path)
    changed = replace(loaded.plan, **{"speculation": None} | plan)
    return LLM.from_engine(Engine.from_parts(replace(loaded, plan=changed, drafter=drafter)))


def questions() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(VOCAB - 7, (21,), generator=generator).tolist()
    others = [torch.randint(VOCAB - 7, (n,), generator=generator).tolist() for n in (5, 30)]
    return [first, *others, [*first, 7, 8, 9]]


@cache
def greedy_text(path) -> list[list[int]]:
    """Transformers alone, every token from the whole sequence anew: no cache that could be wrong."""
    plainest = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plainest).eval()
    answers = []
    with torch.inference_mode():
        for question in questions():
            tokens = list(question)
            for _ in range(ANSWER):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
            answers.append(tokens[len(question) :])
    return answers


def tokens_of(results) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("model_type", [*PAGED, *ALONE])
def test_greedy_text_equals_transformers(foreign_models, model_type):
    path = foreign_models[model_type]
    model = llm(path)
    assert bool(why_alone(model.engine.model_config)) == (model_type in ALONE)
    assert tokens_of(model.generate(questions(), GREEDY, progress=False)) == greedy_text(path)


@pytest.mark.parametrize("model_type", PAGED)
def test_drafts_change_nothing(foreign_models, model_type):
    """Half of them are right. Their rows run through the same modules, several of a sequence at a time."""
    path = foreign_models[model_type]
    expected = greedy_text(path)
    answers = {(str(i), 0): tokens for i, tokens in enumerate(expected, 1)}
    wanted = SpeculationPlan("NGRAM", 3, governed=False)
    model = llm(path, OracleDrafter(answers, 0.5, VOCAB), speculation=wanted)
    assert tokens_of(model.generate(questions(), GREEDY, progress=False)) == expected
    said = model.engine.stats().speculation
    assert 0 < said.accepted_tokens < said.draft_tokens


@pytest.mark.parametrize("model_type", ALONE)
def test_models_with_a_cache_of_their_own_decode_one_token(foreign_models, model_type):
    plan = parts(foreign_models[model_type]).plan
    assert plan.speculation is None
    assert [n for n in plan.notices if n.startswith("--speculative-algorithm NGRAM changes nothing: Transf")]


@pytest.mark.parametrize("model_type", PAGED)
def test_company_chunks_and_preemption_change_nothing(foreign_models, model_type):
    path = foreign_models[model_type]
    tight = llm(path, max_step_tokens=9, num_pages=16, radix_cache=False)
    assert tokens_of(tight.generate(questions(), GREEDY, progress=False)) == greedy_text(path)
    assert tight.engine.stats().preemptions > 0
    alone = llm(path, max_running_requests=1, radix_cache=False)
    assert tokens_of(alone.generate(questions(), GREEDY, progress=False)) == greedy_text(path)


@pytest.mark.parametrize("model_type", PAGED)
def test_a_shared_prefix_is_not_computed_again(foreign_models, model_type):
    path, model = foreign_models[model_type], llm(foreign_models[model_type])
    first, _, _, longer = questions()
    wanted = greedy_text(path)
    assert tokens_of(model.generate([first], GREEDY, progress=False)) == wanted[:1]
    [result] = model.generate([longer], GREEDY, progress=False)
    assert result.cached_tokens == 20 and result.token_ids == wanted[3]


@pytest.mark.parametrize("model_type", ALONE)
def test_alone_in_chunks_and_with_several_answers(foreign_models, model_type):
    path = foreign_models[model_type]
    model = llm(path, max_step_tokens=9)
    assert tokens_of(model.generate(questions(), GREEDY, progress=False)) == greedy_text(path)
    twice = replace_n(GREEDY, 2)
    [result] = model.generate(questions()[:1], twice, progress=False)
    assert [answer.token_ids for answer in result.answers] == [greedy_text(path)[0]] * 2
    assert result.cached_tokens == 0


def replace_n(params: SamplingParams, n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=params.max_tokens, ignore_eos=True, n=n)


@pytest.mark.parametrize("model_type", ALONE)
def test_the_plan_says_that_requests_wait(foreign_models, model_type):
    plan = parts(foreign_models[model_type]).plan
    assert plan.max_running_requests == 1 and not plan.radix_cache
    assert any("one sequence at a time" in notice for notice in plan.notices)
