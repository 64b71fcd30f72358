"""`OllamaWriter`: one answer as Ollama gives it: one JSON object, or one in each line."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec

from tandem.engine.protocol import TokenOutput
from tandem.server.chat.answer_parser import AnswerParser
from tandem.server.chat.collect import AnsweredCall, CollectedEvent, CutCall
from tandem.server.chat.events import Finish, ReasoningDelta, TextDelta
from tandem.server.chat.one_answer import OneAnswer
from tandem.server.chat.tools_in_text import arguments_object
from tandem.server.errors import ApiError
from tandem.server.ollama.errors import error_body
from tandem.server.ollama.schema import CalledFunction, CalledTool, Said, StreamLine

LINES = "application/x-ndjson"


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter:
    def __init__(self, model: str, parser: AnswerParser, *, chat: bool) -> None:
        self._model, self._chat = model, chat
        self._answer = OneAnswer(parser)
        self._events: list[CollectedEvent] = []  # of a whole answer
        self._calls = 0
        self._began = time.monotonic_ns()
        self._first_at = self._began

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        return b"".join(self._line(self._chunk([event])) for event in self._new(outputs))

    def last(self) -> bytes:
        return self._line(self._chunk([], done=True))

    def failed(self, error: ApiError) -> bytes:
        return error_body(error) + b"\n"

    def waiting(self) -> bytes:
        return self._line(self._chunk([]))

    def take(self, outputs: list[TokenOutput]) -> None:
        self._events += self._new(outputs)

    def whole(self) -> StreamLine:
        return self._chunk(self._events, done=True)

    def _new(self, outputs: list[TokenOutput]) -> list[CollectedEvent]:
        if self._answer.completion_tokens == 0:
            self._first_at = time.monotonic_ns()
        events = self._answer.collected(outputs)
        return [event for event in events if not isinstance(event, Finish)]

    def _chunk(self, events: list[CollectedEvent], done: bool = False) -> StreamLine:
        text = "".join(map(_text, events))
        thinking = "".join(event.text for event in events if isinstance(event, ReasoningDelta)) or None
        chunk = StreamLine(model=self._model, created_at=now(), done=done)
        if self._chat:
            calls = [self._call(event) for event in events if isinstance(event, AnsweredCall)]
            message = Said("assistant", text, thinking, calls or None)
            chunk = msgspec.structs.replace(chunk, message=message)
        else:
            chunk = msgspec.structs.replace(chunk, response=text, thinking=thinking)
        return self._finished(chunk) if done else chunk

    def _call(self, call: AnsweredCall) -> CalledTool:
        function = CalledFunction(call.name, arguments_object(call.arguments), self._calls)
        self._calls += 1
        return CalledTool(function, call.id)

    def _finished(self, chunk: StreamLine) -> StreamLine:
        ended = time.monotonic_ns()
        return msgspec.structs.replace(
            chunk,
            done_reason="stop" if self._answer.finish in ("stop", "tool_calls") else "length",
            total_duration=ended - self._began,
            load_duration=0,
            prompt_eval_count=self._answer.prompt_tokens,
            prompt_eval_duration=self._first_at - self._began,
            eval_count=self._answer.completion_tokens,
            eval_duration=ended - self._first_at,
        )

    def _line(self, chunk: StreamLine) -> bytes:
        return msgspec.json.encode(chunk) + b"\n"


def _text(event: CollectedEvent) -> str:
    """A call's arguments are an object here, so one that was cut can only be text."""
    if isinstance(event, CutCall):
        return event.raw
    return event.text if isinstance(event, TextDelta) else ""
