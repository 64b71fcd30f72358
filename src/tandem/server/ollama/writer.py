"""`OllamaWriter`: one answer as Ollama gives it: one JSON object, or one in each line."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec

from tandem.engine.protocol import TokenOutput
from tandem.server.chat.answer_parser import AnswerParser
from tandem.server.chat.events import AnsweredCall, Finish, ReasoningDelta, TextDelta
from tandem.server.chat.settled import SettledCalls, SettledEvent
from tandem.server.chat.tools_in_text import arguments_object
from tandem.server.errors import ApiError, naming
from tandem.server.generation import Answer
from tandem.server.ollama.schema import CalledFunction, CalledTool, Chunk, OllamaError, Said

LINES = "application/x-ndjson"


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(OllamaError(naming(error)))


def failure(error: ApiError) -> bytes:
    return error_body(error) + b"\n"


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter:
    def __init__(self, model: str, parser: AnswerParser, *, chat: bool) -> None:
        self._model, self._parser, self._chat = model, parser, chat
        self._settled = SettledCalls()
        self._counts = Answer()
        self._finish = "stop"
        self._events: list[SettledEvent] = []  # of a whole answer
        self._calls = 0
        self._began = time.monotonic_ns()
        self._first_at = self._began

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        return b"".join(self._line(self._chunk([event])) for event in self._new(outputs))

    def last(self) -> bytes:
        return self._line(self._chunk([], done=True))

    def take(self, outputs: list[TokenOutput]) -> None:
        self._events += self._new(outputs)

    def whole(self) -> Chunk:
        return self._chunk(self._events, done=True)

    def _new(self, outputs: list[TokenOutput]) -> list[SettledEvent]:
        if self._counts.completion_tokens == 0:
            self._first_at = time.monotonic_ns()
        found: list[SettledEvent] = []
        for output in outputs:
            self._counts.add(output)
            self._counts.forget()
            events = self._parser.push(output.text)
            if output.finish_reason is not None:
                events += self._parser.end(output.finish_reason)
            found += self._settled.push(events)
        for event in found:
            if isinstance(event, Finish):
                self._finish = event.reason
        return [event for event in found if not isinstance(event, Finish)]

    def _chunk(self, events: list[SettledEvent], done: bool = False) -> Chunk:
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        thinking = "".join(event.text for event in events if isinstance(event, ReasoningDelta)) or None
        chunk = Chunk(model=self._model, created_at=now(), done=done)
        if self._chat:
            calls = [self._call(event) for event in events if isinstance(event, AnsweredCall)]
            said = Said("assistant", text, thinking, calls or None)
            chunk = msgspec.structs.replace(chunk, message=said)
        else:
            chunk = msgspec.structs.replace(chunk, response=text, thinking=thinking)
        return self._finished(chunk) if done else chunk

    def _call(self, call: AnsweredCall) -> CalledTool:
        function = CalledFunction(call.name, arguments_object(call.arguments), self._calls)
        self._calls += 1
        return CalledTool(function, call.id)

    def _finished(self, chunk: Chunk) -> Chunk:
        ended = time.monotonic_ns()
        return msgspec.structs.replace(
            chunk,
            done_reason="stop" if self._finish in ("stop", "tool_calls") else "length",
            total_duration=ended - self._began,
            load_duration=0,
            prompt_eval_count=self._counts.prompt_tokens,
            prompt_eval_duration=self._first_at - self._began,
            eval_count=self._counts.completion_tokens,
            eval_duration=ended - self._first_at,
        )

    def _line(self, chunk: Chunk) -> bytes:
        return msgspec.json.encode(chunk) + b"\n"
