"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import Request, Response

from tandem.engine.protocol import GenerateRequest, SamplingParams, TokenOutput
from tandem.errors import RequestError
from tandem.server.body import decode_fields, read_fields
from tandem.server.errors import ApiError, named
from tandem.server.fields import name_ignored, unknown_fields
from tandem.server.generation import DONE, Answer, Generation, TokenCount, frame, usage_of
from tandem.server.logprobs import chat_logprobs
from tandem.server.openai_sampling import (
    check_stream_options,
    new_id,
    sampling_of,
    wants_usage,
)
from tandem.server.openai_schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Delta,
    Usage,
)
from tandem.server.state import ServerState

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


async def chat(state: ServerState, http: Request) -> Response:
    fields = await read_fields(http)
    body = decode_fields(fields, ChatRequest)
    ignored = unknown_fields(fields, ChatRequest)
    check_stream_options(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    state.admit()
    with named(_names(body)):
        prompt_ids = await _prompt_ids(state, body)
    request = GenerateRequest(id=new_id("chatcmpl"), prompt_ids=prompt_ids, sampling=_sampling(state, body))
    with named(_names(body)):
        generation = Generation(state, http, [request])
    writer = _ChatWriter(state, body, request.id)
    if body.stream:
        response: Response = await generation.events(writer.frames, writer.last)
    else:
        answers = await generation.collect()
        response = Response(msgspec.json.encode(writer.whole(answers[0])), media_type="application/json")
    return name_ignored(response, ignored)


def _names(body: ChatRequest) -> dict[str, str]:
    longest = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {"prompt": "messages", "max_tokens": longest}


def _sampling(state: ServerState, body: ChatRequest) -> SamplingParams:
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_of(body, state.sampling_defaults, max_tokens=limit, logprobs=logprobs)


async def _prompt_ids(state: ServerState, body: ChatRequest) -> list[int]:
    messages = [_message(m, i) for i, m in enumerate(body.messages)]
    text = await state.prompts.render(messages, **_template_variables(body))
    return await state.encode(text, add_special_tokens=False)


def _template_variables(body: ChatRequest) -> dict[str, Any]:
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in ("messages", "self"):
            raise RequestError(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")
    return variables


def _message(message: ChatMessage, index: int) -> dict[str, Any]:
    """As chat templates want it: one known role, plain text."""
    where = f"messages[{index}]"
    if message.role in ("tool", "function") or message.tool_calls:
        raise ApiError(400, f"{where}: tools are not available yet", param=where, code="not_available")
    if message.role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise RequestError(f"{where}.role must be one of {roles}, not {message.role[:40]!r}", f"{where}.role")
    result = {"role": _ROLES[message.role], "content": _content(message, where)}
    return result if message.name is None else result | {"name": message.name}


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{where}.content is missing; send a string", f"{where}.content")
    for i, part in enumerate(content):
        if part.type != "text":
            text = f"{where}.content[{i}]: only text parts are served, not {part.type[:40]!r}"
            raise ApiError(400, text, param=f"{where}.content[{i}].type", code="not_available")
    return "".join(part.text or "" for part in content)


class _ChatWriter:
    """Writes one request's answers, whole or as events."""

    def __init__(self, state: ServerState, body: ChatRequest, request_id: str) -> None:
        self._tokenizer = state.tokenizer
        self._head: dict[str, Any] = {
            "id": request_id,
            "created": int(time.time()),
            "model": state.model_name,
        }
        self._with_logprobs = bool(body.logprobs)
        self._with_usage = wants_usage(body.stream_options)
        self._count = TokenCount()
        self._greeted: set[int] = set()
        self._encoder = msgspec.json.Encoder()

    def whole(self, answers: list[Answer]) -> ChatCompletion:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return ChatCompletion(**self._head, choices=choices, usage=usage_of([answers]))

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        logprobs = chat_logprobs(self._tokenizer, answer.logprobs) if self._with_logprobs else None
        message = AssistantMessage(answer.text)
        return ChatChoice(index, message, logprobs, answer.finish_reason, answer.stop_match)

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        return b"".join([self._frame(output) for output in outputs])

    def _frame(self, output: TokenOutput) -> bytes:
        self._count.add(output)
        data = b""
        if output.index not in self._greeted:
            self._greeted.add(output.index)
            data = self._event(ChatChunkChoice(output.index, Delta("assistant", "")))
        logprobs = self._logprobs(output)
        if output.text or logprobs:
            data += self._event(ChatChunkChoice(output.index, Delta(content=output.text), logprobs))
        if output.finish_reason is not None:
            data += self._event(ChatChunkChoice(output.index, Delta(), None, output.finish_reason))
        return data

    def _logprobs(self, output: TokenOutput) -> ChatLogprobs | None:
        if not (self._with_logprobs and output.logprobs):
            return None
        return chat_logprobs(self._tokenizer, output.logprobs)

    def _event(self, choice: ChatChunkChoice) -> bytes:
        if self._with_usage:
            return self._chunk([choice], None)
        return frame(self._encoder.encode(ChatChunk(**self._head, choices=[choice])))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> bytes:
        return frame(self._encoder.encode(ChatChunk(**self._head, choices=choices, usage=usage)))

    def last(self) -> bytes:
        return (self._chunk([], self._count.usage()) if self._with_usage else b"") + DONE
