"""`ChatWriter`: one request's answers as /v1/chat/completions gives them, whole or as events."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tandem.engine.protocol import TokenOutput
from tandem.server.chat.collect import ChatAnswer, whole_answer
from tandem.server.chat.events import (
    ChatEvent,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from tandem.server.chat.model import PreparedChat
from tandem.server.chat.one_answer import OneAnswer
from tandem.server.chat.openai.schema import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatRequest,
    Delta,
    FunctionDelta,
    ToolCallDelta,
)
from tandem.server.errors import ApiError
from tandem.server.generation import DONE, PartialAnswer, TokenCount, comment, frame, openai_failure, usage_of
from tandem.server.logprobs import chat_logprobs
from tandem.server.openai_sampling import wants_all_usage, wants_usage
from tandem.server.openai_schema import CompletionTokensDetails, Usage
from tandem.server.state import ServerState


class ChatWriter:
    def __init__(
        self, state: ServerState, body: ChatRequest, prepared: PreparedChat, request_id: str
    ) -> None:
        self._tokenizer = state.tokenizer
        self._prepared = prepared
        self._head: dict[str, Any] = {
            "id": request_id,
            "created": int(time.time()),
            "model": state.model_name,
        }
        self._with_logprobs = bool(body.logprobs)
        self._with_ids = bool(body.return_token_ids)
        self._prompt_ids = prepared.prompt_ids if self._with_ids else UNSET
        self._with_reasoning = body.include_reasoning is not False
        self._with_usage = wants_usage(body.stream_options)
        self._all_usage = wants_all_usage(body.stream_options)
        self._count = TokenCount()
        self._answers: dict[int, OneAnswer] = {}
        self._received: dict[int, PartialAnswer] = {}
        self._events: dict[int, list[ChatEvent]] = {}
        self._encoder = msgspec.json.Encoder()

    def _answer(self, index: int) -> OneAnswer:
        if index not in self._answers:
            self._answers[index] = OneAnswer(self._prepared.new_parser())
        return self._answers[index]

    def _detailed(self, usage: Usage) -> Usage:
        tokens = sum(answer.reasoning_tokens for answer in self._answers.values())
        return msgspec.structs.replace(usage, completion_tokens_details=CompletionTokensDetails(tokens))

    def _usage(self) -> Usage:
        return self._detailed(self._count.usage())

    # --- whole

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self._received.setdefault(output.index, PartialAnswer()).add(output)
            self._events.setdefault(output.index, []).extend(self._answer(output.index).events(output))

    def whole(self) -> ChatCompletion:
        answers = [self._received[index] for index in sorted(self._received)]
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        usage = self._detailed(usage_of([answers]))
        return ChatCompletion(**self._head, choices=choices, usage=usage, prompt_token_ids=self._prompt_ids)

    def _choice(self, index: int, answer: PartialAnswer) -> ChatChoice:
        logprobs = chat_logprobs(self._tokenizer, answer.logprobs) if self._with_logprobs else None
        whole = whole_answer(self._events[index])
        ids = answer.token_ids if self._with_ids else UNSET
        return ChatChoice(index, self._message(whole), logprobs, whole.finish_reason, answer.stop_match, ids)

    def _message(self, answer: ChatAnswer) -> AssistantMessage:
        calls = [CalledTool(call.id, CalledFunction(call.name, call.arguments)) for call in answer.calls]
        reasoning = answer.reasoning if answer.reasoning and self._with_reasoning else UNSET
        content = None if calls and not answer.text else answer.text
        return AssistantMessage(content, reasoning_content=reasoning, tool_calls=calls or UNSET)

    # --- as events

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        return b"".join([self._frames(output) for output in outputs])

    def _frames(self, output: TokenOutput) -> bytes:
        self._count.add(output)
        data = b""
        if output.index not in self._answers:
            data = self._event(ChatChunkChoice(output.index, Delta("assistant", "")), self._prompt_ids)
        return data + b"".join(self._event(choice) for choice in self._chunks(output))

    def _chunks(self, output: TokenOutput) -> list[ChatChunkChoice]:
        events = self._answer(output.index).events(output)
        choices = [choice for event in events if (choice := self._of(output.index, event)) is not None]
        extra = self._token_fields(output)
        if not extra:
            return choices
        if not choices or choices[0].finish_reason is not None:  # the text is held back
            return [ChatChunkChoice(output.index, Delta(content=""), **extra), *choices]
        return [msgspec.structs.replace(choices[0], **extra), *choices[1:]]

    def _of(self, index: int, event: ChatEvent) -> ChatChunkChoice | None:
        match event:
            case TextDelta(text):
                return ChatChunkChoice(index, Delta(content=text))
            case ReasoningDelta(text):
                return ChatChunkChoice(index, Delta(reasoning_content=text)) if self._with_reasoning else None
            case ToolCallStart(number, call_id, name):
                return _call(index, ToolCallDelta(number, FunctionDelta(name, ""), call_id, "function"))
            case ToolCallArguments(number, fragment):
                return _call(index, ToolCallDelta(number, FunctionDelta(arguments=fragment)))
            case Finish(reason):
                return ChatChunkChoice(index, Delta(), None, reason)
        return None

    def _token_fields(self, output: TokenOutput) -> dict[str, Any]:
        """Fields about the output's tokens, beside their text."""
        fields: dict[str, Any] = {}
        if self._with_logprobs and output.logprobs:
            fields["logprobs"] = chat_logprobs(self._tokenizer, output.logprobs)
        if self._with_ids and output.token_ids:
            fields["token_ids"] = output.token_ids
        return fields

    def _event(self, choice: ChatChunkChoice, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        usage: Usage | UnsetType | None = UNSET
        if self._with_usage:
            usage = self._usage() if self._all_usage else None
        return self._chunk([choice], usage, prompt_ids)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:  # fmt: skip
        chunk = ChatChunk(**self._head, choices=choices, usage=usage, prompt_token_ids=prompt_ids)
        return frame(self._encoder.encode(chunk))

    def last(self) -> bytes:
        return (self._chunk([], self._usage()) if self._with_usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        return openai_failure(error)

    def waiting(self) -> bytes:
        return comment()


def _call(index: int, delta: ToolCallDelta) -> ChatChunkChoice:
    return ChatChunkChoice(index, Delta(tool_calls=[delta]))
