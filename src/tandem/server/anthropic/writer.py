"""`MessageWriter`: one answer as Anthropic gives it, whole or as events. Both come from the same outputs in the same
way, so they say the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.engine.protocol import TokenOutput
from tandem.server.anthropic.errors import error_body
from tandem.server.anthropic.schema import MessageResponse, OutputDetails, Usage
from tandem.server.chat.answer_parser import AnswerParser
from tandem.server.chat.collect import AnsweredCall, CollectedEvent, CutCall
from tandem.server.chat.events import Finish, ReasoningDelta, TextDelta
from tandem.server.chat.one_answer import OneAnswer
from tandem.server.chat.tools_in_text import arguments_object
from tandem.server.errors import ApiError
from tandem.server.generation import frame

PING_SECONDS = 5.0  # without an event, while a call is written that is not shown yet
SIGNATURE = "dGFuZGVt"  # of all thinking: clients send it back, and want it not to be empty

Event = dict[str, Any]
_PING: Event = {"type": "ping"}


class MessageWriter:
    def __init__(
        self, message_id: str, model: str, parser: AnswerParser, prompt_tokens: int, *, clipped: bool,
        show_thinking: bool,
    ) -> None:  # fmt: skip
        """clipped: the context ends before `max_tokens`."""
        self._id, self._model, self._clipped = message_id, model, clipped
        self._prompt_tokens = prompt_tokens
        self._answer = OneAnswer(parser)
        self._blocks = _BlockWriter(show_thinking)
        self._begun = False
        self._sent_at = 0.0

    # --- whole

    def take(self, outputs: list[TokenOutput]) -> list[Event]:
        return [new for event in self._answer.collected(outputs) for new in self._blocks.add(event)]

    def whole(self) -> MessageResponse:
        return MessageResponse(
            self._id, self._model, self._blocks.whole(), self._stop_reason(), self._stop_sequence(), self._usage()
        )

    # --- as events

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        events = self.take(outputs)
        now = time.monotonic()
        if not self._begun:
            events = [*self._begin(), *events]
        elif not events and now - self._sent_at > PING_SECONDS:
            events = [_PING]
        if events:
            self._sent_at = now
        return b"".join(map(_frame, events))

    def last(self) -> bytes:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        usage = msgspec.to_builtins(self._usage())
        end: list[Event] = [
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]
        return b"".join(map(_frame, end))

    def failed(self, error: ApiError) -> bytes:
        return frame(error_body(error), "error")

    def waiting(self) -> bytes:
        """A stream begins with its message, also where the prompt takes long."""
        return b"".join(map(_frame, [_PING] if self._begun else self._begin()))

    def _begin(self) -> list[Event]:
        self._begun = True
        empty = MessageResponse(self._id, self._model, [], None, None, self._usage())
        return [{"type": "message_start", "message": msgspec.to_builtins(empty)}, _PING]

    def _stop_sequence(self) -> str | None:
        match = self._answer.stop_match
        return match if isinstance(match, str) and self._answer.finish == "stop" else None

    def _stop_reason(self) -> str:
        """There is no reason for an answer that was aborted; it was cut."""
        finish = self._answer.finish
        if finish == "tool_calls":
            return "tool_use"
        if finish == "stop":
            return "end_turn" if self._stop_sequence() is None else "stop_sequence"
        return "model_context_window_exceeded" if self._clipped and finish == "length" else "max_tokens"

    def _usage(self) -> Usage:
        answer = self._answer
        fresh = (answer.prompt_tokens or self._prompt_tokens) - answer.cached_tokens
        details = OutputDetails(answer.reasoning_tokens)
        return Usage(fresh, answer.completion_tokens, answer.cached_tokens, details)


class _BlockWriter:
    """An answer's content blocks, in order; `add` gives what is new as events."""

    def __init__(self, show_thinking: bool) -> None:
        self._done: list[dict[str, Any]] = []
        self._open: str | None = None
        self._pieces: list[str] = []
        self._show_thinking = show_thinking

    def whole(self) -> list[dict[str, Any]]:
        return self._done

    def add(self, event: CollectedEvent) -> Iterator[Event]:
        match event:
            case TextDelta(text):
                yield from self._grow("text", text, {"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                visible = text if self._show_thinking else ""
                yield from self._grow("thinking", visible, {"type": "thinking_delta", "thinking": visible})
            case AnsweredCall():
                yield from self._close()
                yield from self._call(event)
            case CutCall(raw=raw):  # a client would run what looks like a call
                yield from self.add(TextDelta(raw))
            case Finish():
                yield from self._close()

    def _grow(self, kind: str, text: str, delta: dict[str, Any]) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield self._start(_block(kind, "", ""))
        self._pieces.append(text)
        if text:
            yield self._delta(delta)

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield self._stop()
        self._done.append(_block(self._open, "".join(self._pieces), SIGNATURE))
        self._open = None
        self._pieces.clear()

    def _call(self, call: AnsweredCall) -> Iterator[Event]:
        arguments = arguments_object(call.arguments)
        block = {"type": "tool_use", "id": _tool_use_id(call.id), "name": call.name, "input": dict[str, Any]()}
        yield self._start(block)
        text = msgspec.json.encode(arguments).decode()
        yield self._delta({"type": "input_json_delta", "partial_json": text})
        yield self._stop()
        self._done.append(block | {"input": arguments})

    def _start(self, block: dict[str, Any]) -> Event:
        return {"type": "content_block_start", "index": len(self._done), "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._done), "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": len(self._done)}


def _block(kind: str, text: str, signature: str) -> dict[str, Any]:
    block = {"type": kind, kind: text}
    return block | {"signature": signature} if kind == "thinking" else block


def _tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def _frame(event: Event) -> bytes:
    return frame(msgspec.json.encode(event), event["type"])
