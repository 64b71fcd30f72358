"""POST /generate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.engine.sampling.parameters import Dialect, names_in
from tandem.errors import RequestError
from tandem.server.body import json_response, read_fields
from tandem.server.chat.answer_grammar import grammar_field, grammar_of
from tandem.server.errors import named
from tandem.server.fields import name_ignored, read_fields_as, refuse_misspelt
from tandem.server.generation import (
    DONE,
    PartialAnswer,
    SubmittedRequests,
    Writing,
    comment,
    frame,
    openai_failure,
)
from tandem.server.limits import MAX_PROMPTS
from tandem.server.logprobs import sglang_logprobs, sglang_top_logprobs
from tandem.server.openai_sampling import dry_breakers, logit_bias, new_id, stop_strings
from tandem.server.sampling_bodies import sent_parameters
from tandem.server.sglang_images import PromptWithImages, with_images
from tandem.server.sglang_schema import FinishReason, MetaInfo, SglangAnswer, SglangRequest, SglangSampling
from tandem.server.state import ServerState

T = TypeVar("T")

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's


@dataclass(frozen=True, slots=True)
class _SglangPrompts:
    """One prompt of the batch and what it asks for."""

    request: GenerateRequest
    shown: PromptWithImages  # keeps the pixels of its images
    logprobs: bool
    start: int  # first prompt token whose log-probability is reported; -1: none
    top: int


async def generate(state: ServerState, http: Request) -> Response:
    fields = await read_fields(http)
    state.prompts.check_length(fields.get("input_ids"), "input_ids")
    body, ignored = read_fields_as(fields, SglangRequest, SglangSampling)
    refuse_misspelt(ignored, SglangSampling)
    name = body.rid if isinstance(body.rid, str) else ""
    with state.admitted(), named(_names(body)):
        asks, batched = await _asks(state, body)
        generation = SubmittedRequests(state, http, [ask.request for ask in asks], name)
        writer = _Writer(state, body, asks, generation, batched)
        if body.stream:
            response: Response = await generation.events(Writing(writer.frames, lambda: DONE, openai_failure, comment))
        else:
            response = json_response(writer.whole(await generation.collect()))
    return name_ignored(response, ignored)


def _names(body: SglangRequest) -> dict[str, str]:
    params = body.sampling_params
    each = params if isinstance(params, list) else [params or SglangSampling()]
    grammar = next((name for one in each if (name := grammar_field(one))), "grammar")
    return names_in(Dialect.SGLANG) | {"prompt": "text" if body.input_ids is None else "input_ids", "grammar": grammar}


async def _asks(state: ServerState, body: SglangRequest) -> tuple[list[_SglangPrompts], bool]:
    prompts, batched = await _prompts(state, body)
    shown_prompts = await with_images(state, body, prompts, batched)
    count = len(shown_prompts)
    params = _spread(body.sampling_params, SglangSampling(), count, "sampling_params")
    with_logprobs = _spread(body.return_logprob, False, count, "return_logprob")
    starts = _spread(body.logprob_start_len, -1, count, "logprob_start_len")
    tops = _spread(body.top_logprobs_num, 0, count, "top_logprobs_num")
    asks = []
    for prompt, rid, p, logprobs, start, top in zip(
        shown_prompts, _ids(body.rid, count), params, with_logprobs, starts, tops, strict=True
    ):
        sampling = _sampling(state, p, len(prompt.ids), top if logprobs else None, top if start >= 0 else None)
        request = GenerateRequest(id=rid, prompt_ids=prompt.ids, sampling=sampling, images=prompt.images)
        asks.append(_SglangPrompts(request, prompt, logprobs, start, top))
    return asks, batched


async def _prompts(state: ServerState, body: SglangRequest) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether the body was a batch. Raises RequestError."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("send either text or input_ids", "text")
    if body.text is not None:
        texts = body.text if isinstance(body.text, list) else [body.text]
        return await state.encode_all(texts, add_special_tokens=True), isinstance(body.text, list)
    items = body.input_ids or []
    flat = [entry for entry in items if isinstance(entry, int)]
    if len(flat) == len(items):
        return [flat], False
    if flat:
        raise RequestError("input_ids mixes token ids and lists", "input_ids")
    if len(items) > MAX_PROMPTS:
        raise RequestError(f"at most {MAX_PROMPTS} prompts in one request, not {len(items)}", "input_ids")
    return [entry for entry in items if isinstance(entry, list)], True


def _spread(value: T | list[T] | None, default: T, count: int, name: str) -> list[T]:
    """One value for every prompt, or a list with one each."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts", name)
    return value


def _ids(rid: str | list[str] | None, count: int) -> list[str]:
    """A single `rid` for a batch names its members rid-0, rid-1, …"""
    if isinstance(rid, str) and count > 1:
        return [f"{rid}-{i}" for i in range(count)]
    ids = _spread(rid, "", count, "rid")
    if any(ids) and len(set(ids)) != count:
        raise RequestError("each rid of a batch must be different", "rid")
    return [name or new_id("gen") for name in ids]


def _sampling(
    state: ServerState, p: SglangSampling, prompt_tokens: int, top: int | None, prompt_top: int | None
) -> SamplingSettings:
    """The default max_new_tokens shrinks to what fits; a limit that the user set is taken at its word."""
    limit = p.max_new_tokens
    if isinstance(limit, msgspec.UnsetType):
        limit = max(1, min(DEFAULT_MAX_NEW_TOKENS, state.answer_room(prompt_tokens)))
    same = sent_parameters(p, Dialect.SGLANG)
    return SamplingSettings(
        **same,
        max_tokens=limit,
        logit_bias=logit_bias(p.logit_bias),
        grammar=grammar_of(p),
        stop=stop_strings(p.stop),
        stop_token_ids=tuple(p.stop_token_ids or ()),
        include_stop=p.no_stop_trim,
        dry_breakers=dry_breakers(p.dry_sequence_breakers, same, state.tokenizer),
        logprobs=top,
        prompt_logprobs=None if top is None else prompt_top,
    )


class _Writer:
    """Answers in SGLang's shape: one object, or a list for a batch or n > 1.

    An event of a stream has the whole text and all ids so far. It has the log-probabilities of its own tokens only;
    the last event has all, for clients that look at no other. With `--incremental-streaming-output` each event has
    what is new, and nothing is kept.
    """

    def __init__(
        self,
        state: ServerState,
        body: SglangRequest,
        asks: Sequence[_SglangPrompts],
        generation: SubmittedRequests,
        batched: bool,
    ) -> None:
        self._tokenizer = state.tokenizer
        self._asks = asks
        self._generation = generation
        self._with_text = body.return_text_in_logprobs
        self._incremental = state.config.incremental_streaming_output
        self._batched = batched
        self._began = time.monotonic()
        self._answers = [[PartialAnswer() for _ in range(ask.request.sampling.n)] for ask in asks]
        self._several = sum(len(each) for each in self._answers) > 1
        self._encoder = msgspec.json.Encoder()

    def whole(self, answers: list[list[PartialAnswer]]) -> SglangAnswer | list[SglangAnswer]:
        shaped = [
            self._shape(ask, answer, answer, None)
            for ask, each in zip(self._asks, answers, strict=True)
            for answer in each
        ]
        return shaped if self._batched or self._several else shaped[0]

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        """One event for each answer. A reader who is late does not get the text of each token again."""
        new: dict[tuple[int, int], PartialAnswer] = {}
        for output in outputs:
            place = self._generation.position(output), output.index
            self._answers[place[0]][place[1]].add(output)
            new.setdefault(place, PartialAnswer()).add(output)
        return b"".join([self._frame(*place, answer) for place, answer in new.items()])

    def _frame(self, position: int, index: int, new: PartialAnswer) -> bytes:
        answer = self._answers[position][index]
        scored = answer if answer.finish_reason is not None and not self._incremental else new
        before = sum(len(each) for each in self._answers[:position])
        number = before + index if self._several or self._batched else None
        data = frame(self._encoder.encode(self._shape(self._asks[position], answer, scored, number)))
        if self._incremental:
            answer.forget()
        return data

    def _shape(
        self, ask: _SglangPrompts, answer: PartialAnswer, scored: PartialAnswer, index: int | None
    ) -> SglangAnswer:
        """scored: whose log-probabilities are told."""
        meta = MetaInfo(
            id=ask.request.id,
            finish_reason=_finish_reason(answer),
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            e2e_latency=None if answer.finish_reason is None else time.monotonic() - self._began,
            **(self._logprobs(ask, scored) if ask.logprobs else {}),
        )
        return SglangAnswer(answer.text, answer.token_ids, meta, index)

    def _logprobs(self, ask: _SglangPrompts, answer: PartialAnswer) -> dict[str, Any]:
        prompt = answer.prompt_logprobs[ask.start :] if ask.start >= 0 else []
        shapes: dict[str, Any] = {
            "input_token_logprobs": sglang_logprobs(self._tokenizer, prompt, self._with_text),
            "output_token_logprobs": sglang_logprobs(self._tokenizer, answer.logprobs, self._with_text),
        }
        if ask.top > 0:
            top = sglang_top_logprobs(self._tokenizer, answer.logprobs, self._with_text)
            shapes["input_top_logprobs"] = sglang_top_logprobs(self._tokenizer, prompt, self._with_text)
            shapes["output_top_logprobs"] = top
        return shapes


def _finish_reason(answer: PartialAnswer) -> FinishReason | None:
    match answer.finish_reason:
        case None:
            return None
        case "stop":
            return FinishReason("stop", matched=answer.stop_match)
        case "length":
            return FinishReason("length", length=answer.completion_tokens)
        case reason:
            return FinishReason(reason, message="the request was aborted")
