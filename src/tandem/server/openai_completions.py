"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request, Response

from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenLogprob, TokenOutput
from tandem.engine.sampling.parameters import Dialect, names_in
from tandem.errors import RequestError
from tandem.server.body import json_response, read_fields
from tandem.server.chat.answer_grammar import grammar_field
from tandem.server.errors import named
from tandem.server.fields import name_ignored, read_fields_as
from tandem.server.generation import (
    DONE,
    PartialAnswer,
    SubmittedRequests,
    TokenCount,
    Writing,
    comment,
    frame,
    openai_failure,
    usage_of,
)
from tandem.server.limits import MAX_PROMPTS
from tandem.server.logprobs import CompletionOffsets
from tandem.server.openai_sampling import (
    check_stream_options,
    dry_breakers,
    request_id,
    sampling_of,
    wants_all_usage,
    wants_usage,
)
from tandem.server.openai_schema import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TextCompletion,
)
from tandem.server.sampling_bodies import sent_parameters
from tandem.server.state import ServerState

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class _CompletionPrompt:
    ids: list[int]
    text: str  # what echo repeats


async def complete(state: ServerState, http: Request) -> Response:
    fields = await read_fields(http)
    state.prompts.check_length(fields.get("prompt"), "prompt")
    body, ignored = read_fields_as(fields, CompletionRequest)
    _check_counts(body)
    check_stream_options(body)
    with state.admitted():
        prompts = await _read_prompts(state, _split(body.prompt), body)
        completion_id = request_id(body, "cmpl")
        with named(names_in(Dialect.OPENAI) | {"grammar": grammar_field(body) or "grammar"}):
            generation = SubmittedRequests(state, http, _requests(state, body, prompts, completion_id), completion_id)
            writer = _CompletionWriter(state, body, prompts, completion_id)
            if body.stream:
                response: Response = await generation.events(
                    Writing(writer.frames, writer.last, openai_failure, comment)
                )
            else:
                response = json_response(writer.whole(await generation.collect()))
    return name_ignored(response, ignored)


def _check_counts(body: CompletionRequest) -> None:
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 (0 only with echo: true)", "max_tokens")


def _split(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four forms of OpenAI's `prompt` → list of strings or id lists. Raises RequestError."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise RequestError("prompt mixes token ids with strings or lists", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"at most {MAX_PROMPTS} prompts in one request, not {len(prompt)}", "prompt")
    return [item for item in prompt if not isinstance(item, int)]


async def _read_prompts(
    state: ServerState, prompts: list[str | list[int]], body: CompletionRequest
) -> list[_CompletionPrompt]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await state.encode_all(texts, body.add_special_tokens is not False))
    return [
        _CompletionPrompt(next(encoded), prompt)
        if isinstance(prompt, str)
        else await _read_ids(state, prompt, bool(body.echo))
        for prompt in prompts
    ]


async def _read_ids(state: ServerState, prompt: list[int], echo: bool) -> _CompletionPrompt:
    if not echo:
        return _CompletionPrompt(prompt, "")
    state.check_ids(prompt)
    return _CompletionPrompt(prompt, await state.prompts.decode(prompt, skip_special_tokens=False))


def _requests(
    state: ServerState, body: CompletionRequest, prompts: Sequence[_CompletionPrompt], completion_id: str
) -> list[GenerateRequest]:
    """A single prompt has the response's own id, others a numbered one."""
    ids = [completion_id] if len(prompts) == 1 else [f"{completion_id}-{i}" for i in range(len(prompts))]
    limits = [_limit(state, body, len(prompt.ids)) for prompt in prompts]
    sampling = {limit: _sampling(state, body, limit) for limit in set(limits)}
    return [
        GenerateRequest(id=i, prompt_ids=prompt.ids, sampling=sampling[limit])
        for i, prompt, limit in zip(ids, prompts, limits, strict=True)
    ]


def _limit(state: ServerState, body: CompletionRequest, prompt_tokens: int) -> int:
    """max_tokens 0 asks for the prompt's log-probabilities only: one token is made and left out of the answer."""
    if body.max_tokens is not None:
        return body.max_tokens or 1
    return max(1, min(DEFAULT_MAX_TOKENS, state.answer_room(prompt_tokens)))


def _sampling(state: ServerState, body: CompletionRequest, limit: int) -> SamplingSettings:
    prompt_logprobs = body.logprobs if body.echo else None
    sent = sent_parameters(body, Dialect.OPENAI)
    return sampling_of(
        body,
        state.sampling_defaults,
        max_tokens=limit,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        dry_breakers=dry_breakers(body.dry_sequence_breakers, sent, state.tokenizer),
    )


class _CompletionWriter:
    """Writes one request's answers, whole or as events. Choice number = prompt number × n + answer number."""

    def __init__(
        self, state: ServerState, body: CompletionRequest, prompts: Sequence[_CompletionPrompt], completion_id: str
    ) -> None:
        self._tokenizer = state.tokenizer
        self._head: dict[str, Any] = {
            "id": completion_id,
            "created": int(time.time()),
            "model": state.model_name,
        }
        sent = sent_parameters(body, Dialect.OPENAI)
        self._n = sent.get("n", 1)
        self._prompts = prompts
        self._echo = bool(body.echo)
        self._skip_special = sent.get("skip_special_tokens", True)
        self._prompt_only = body.max_tokens == 0
        self._top = body.logprobs
        self._with_ids = bool(body.return_token_ids)
        self._with_usage = wants_usage(body.stream_options)
        self._all_usage = wants_all_usage(body.stream_options)
        self._count = TokenCount()
        self._offsets: dict[int, CompletionOffsets] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self._numbers: dict[str, int] = {}
        self._begun: set[tuple[str, int]] = set()
        self._encoder = msgspec.json.Encoder()

    def whole(self, answers: list[list[PartialAnswer]]) -> TextCompletion:
        choices = [
            self._choice(prompt, index, answer)
            for prompt, each in enumerate(answers)
            for index, answer in enumerate(each)
        ]
        return TextCompletion(**self._head, choices=choices, usage=usage_of(answers))

    def _choice(self, prompt: int, index: int, answer: PartialAnswer) -> CompletionChoice:
        text, tokens = answer.text, answer.logprobs
        if self._prompt_only:
            text, tokens = "", []
            answer.completion_tokens = 0
        if self._echo:
            first = answer.prompt_logprobs or self._prompt_logprobs.get(prompt, [])
            self._prompt_logprobs[prompt] = first
            text, tokens = self._prompts[prompt].text + text, [*first, *tokens]
        number = prompt * self._n + index
        logprobs, ids = self._logprobs(number, tokens), self._ids(prompt, answer.token_ids, first=True)
        return CompletionChoice(number, text, logprobs, answer.finish_reason, answer.stop_match, **ids)

    def _ids(self, prompt: int, answer: list[int], first: bool) -> dict[str, list[int]]:
        """first: of this answer, or all of it."""
        if not self._with_ids:
            return {}
        ids = {"token_ids": [] if self._prompt_only else answer}
        return ids | {"prompt_token_ids": self._prompts[prompt].ids} if first else ids

    def _logprobs(self, number: int, tokens: list[TokenLogprob]) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        return self._offsets_of(number).build(tokens, with_top=self._top > 0)

    def _offsets_of(self, number: int) -> CompletionOffsets:
        if number not in self._offsets:
            echoed = self._prompts[number // self._n].text if self._echo else ""
            self._offsets[number] = CompletionOffsets(self._tokenizer, echoed, self._skip_special)
        return self._offsets[number]

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        return b"".join([self._frame(output) for output in outputs])

    def _frame(self, output: TokenOutput) -> bytes:
        self._count.add(msgspec.structs.replace(output, completion_tokens=0) if self._prompt_only else output)
        prompt = self._prompt_of(output.id)
        number = prompt * self._n + output.index
        text, tokens = ("", []) if self._prompt_only else (output.text, output.logprobs or [])
        if self._echo and number not in self._offsets:
            self._offsets_of(number)
            first = output.prompt_logprobs or self._prompt_logprobs.get(prompt, [])
            self._prompt_logprobs[prompt] = first
            text, tokens = self._prompts[prompt].text + text, [*first, *tokens]
        begins = (output.id, output.index) not in self._begun
        if not (text or tokens or output.finish_reason or self._with_ids):
            return b""
        self._begun.add((output.id, output.index))
        logprobs, ids = self._logprobs(number, tokens) if tokens else None, self._ids(prompt, output.token_ids, begins)
        choice = CompletionChoice(number, text, logprobs, output.finish_reason, output.stop_match, **ids)
        return self._event(choice)

    def _prompt_of(self, request_id: str) -> int:
        """Ids end in the prompt's number when there are several."""
        if request_id not in self._numbers:
            single = len(self._prompts) == 1
            self._numbers[request_id] = 0 if single else int(request_id.rpartition("-")[2])
        return self._numbers[request_id]

    def _event(self, choice: CompletionChoice) -> bytes:
        if self._with_usage:
            usage = self._count.usage() if self._all_usage else None
            return frame(self._encoder.encode(TextCompletion(**self._head, choices=[choice], usage=usage)))
        return frame(self._encoder.encode(TextCompletion(**self._head, choices=[choice])))

    def last(self) -> bytes:
        if not self._with_usage:
            return DONE
        return (
            frame(self._encoder.encode(TextCompletion(**self._head, choices=[], usage=self._count.usage())))
            + DONE
        )
