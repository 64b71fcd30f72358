"""Answers with tokens of a draft layer, in each of its ways, beside those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from draft_models import PROMPTS
from fake_model import check_pages, request, run, token_ids
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.parts import EngineParts
from tandem.planner.choices.speculation import SpeculationPlan

LONG = [(7 * i + 3) % 250 for i in range(33)]
TIGHT = 9  # pages, of 8 tokens: less than the answers need together
Answers = dict[tuple[str, int], list[int]]


class Way(NamedTuple):
    """right: the share of draft tokens that are accepted; None: the layer's own. pages: of the cache; None: enough for
    all."""

    width: int
    governed: bool
    right: float | None
    pages: int | None = None


class Plain(NamedTuple):
    """A model with its draft layer; what the model alone says, and that as tokens, with more behind each end."""

    parts: EngineParts
    calls: list[list[GenerateRequest]]
    told: list[dict]
    answers: Answers


def calls_of(stop: str) -> list[list[GenerateRequest]]:
    """Two, of which the second finds prefixes of the first."""
    free = {"max_tokens": 22, "ignore_eos": True, "logprobs": 2}
    sampled = {"temperature": 1.0, "seed": 4, "n": 2, "top_k": 20} | free
    penalties = {"frequency_penalty": 0.4, "repetition_penalty": 1.3, "min_tokens": 9} | free
    first = [
        request("greedy", PROMPTS["a"], prompt_logprobs=1, **free),
        request("stops", PROMPTS["c"], stop=(stop,), **free),
        request("sampled", PROMPTS["b"], **sampled),
        request("penalties", LONG, logit_bias={70: 2.0, 9: -3.0}, **penalties),
    ]
    second = [request(f"again{i}", [*LONG, *range(i)], **free) for i in (1, 5)]
    return [first, [*second, request("c", [*PROMPTS["c"], 5], stop_token_ids=tuple(range(40)), **free)]]


def plain(alone: EngineParts, parts: EngineParts) -> Plain:
    assert alone.model_config.drafter is None and parts.model_config.drafter is not None
    text = "".join(o.text for o in run(Engine.from_parts(alone), *calls_of("never")[0])["stops", 0])
    calls, engine = calls_of(text[12:14]), Engine.from_parts(alone)
    outputs = [run(engine, *call) for call in calls]
    found = {key: token_ids(each) for call in outputs for key, each in call.items()}
    assert engine.stats().cached_tokens >= 2 * 32 and len(found["stops", 0]) < 22
    return Plain(parts, calls, [told(call) for call in outputs], {key: [*t, *[7] * 9] for key, t in found.items()})


def told(outputs: dict) -> dict:
    """Parts of each answer: tokens, text, log-probabilities of its prompt and its own, and how it ended."""
    return {
        key: (
            token_ids(each),
            "".join(output.text for output in each),
            each[0].prompt_logprobs,
            [score for output in each for score in output.logprobs or ()],
            (each[-1].finish_reason, each[-1].stop_match),
        )
        for key, each in outputs.items()
    }


def check(known: Plain, way: Way, algorithm: str = "NEXTN") -> None:
    parts, wanted = known.parts, SpeculationPlan(algorithm, way.width, way.governed)
    plan = replace(parts.plan, speculation=wanted, num_pages=way.pages or parts.plan.num_pages)
    vocab = parts.model_config.vocab
    drafter = None if way.right is None else OracleDrafter(known.answers, way.right, vocab)
    engine = Engine.from_parts(replace(parts, plan=plan, drafter=drafter))
    for call, expected in zip(known.calls, known.told, strict=True):
        assert told(run(engine, *call)) == expected
    stats, said = engine.stats(), engine.stats().speculation
    assert said is not None and sum(said.widths) > 0 and len(said.widths) == way.width + 1
    assert stats.preemptions > 0 if way.pages else stats.cached_tokens >= 2 * 32
    if not way.governed:
        assert sum(said.widths[1:]) > said.widths[0] and said.widths[way.width] > 0
    if not way.governed and way.right is not None:
        assert (said.accepted_tokens > 0) == (way.right > 0)
    check_pages(engine)
