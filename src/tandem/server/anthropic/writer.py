"""`MessageWriter`: one answer as Anthropic gives it, whole or as events. Both come from the same outputs in the same
way, so they say the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.engine.protocol import TokenOutput
from tandem.server.anthropic.schema import AnthropicError, ErrorDetail, Message, OutputDetails, Usage
from tandem.server.chat.answer_parser import AnswerParser
from tandem.server.chat.events import AnsweredCall, Finish, ReasoningDelta, TextDelta
from tandem.server.chat.settled import SettledCalls, SettledEvent
from tandem.server.chat.tools_in_text import arguments_object
from tandem.server.errors import ApiError, naming
from tandem.server.generation import frame
from tandem.server.openai_sampling import new_id

PING_SECONDS = 5.0  # without an event, while a call is written that is not shown yet
SIGNATURE = "dGFuZGVt"  # of all thinking: clients send it back, and want it not to be empty

_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip

Event = dict[str, Any]


def error_body(error: ApiError) -> bytes:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode(AnthropicError(ErrorDetail(kind, naming(error)), new_id("req")))


def failure(error: ApiError) -> bytes:
    """The last event of a stream that has begun."""
    return frame(error_body(error), "error")


class MessageWriter:
    def __init__(
        self, message_id: str, model: str, parser: AnswerParser, *, clipped: bool, show_thinking: bool
    ) -> None:
        """clipped: the context ends before `max_tokens`."""
        self._id, self._model, self._parser, self._clipped = message_id, model, parser, clipped
        self._settled = SettledCalls()
        self._blocks = _Blocks(show_thinking)
        self._newest: TokenOutput | None = None
        self._finish = "stop"
        self._sent_at = 0.0
        self._thinking_tokens = 0

    # --- whole

    def take(self, outputs: list[TokenOutput]) -> list[Event]:
        return [event for output in outputs for event in self._events(output)]

    def whole(self) -> Message:
        return Message(
            self._id, self._model, self._blocks.whole(), self._stop_reason(), self._stop_sequence(), self._usage()
        )

    # --- as events

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        first = self._newest is None
        events = self.take(outputs)
        now = time.monotonic()
        if first:
            events = [self._start(outputs[0]), {"type": "ping"}, *events]
        elif not events and now - self._sent_at > PING_SECONDS:
            events = [{"type": "ping"}]
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

    def _start(self, output: TokenOutput) -> Event:
        empty = Message(self._id, self._model, [], None, None, _usage(output, 0))
        return {"type": "message_start", "message": msgspec.to_builtins(empty)}

    def _events(self, output: TokenOutput) -> Iterator[Event]:
        self._newest = output if self._newest is None else _newer(self._newest, output)
        events = self._parser.push(output.text)
        if output.finish_reason is not None:
            events += self._parser.end(output.finish_reason)
        if events and isinstance(events[0], ReasoningDelta):
            self._thinking_tokens += len(output.token_ids)
        for event in self._settled.push(events):
            if isinstance(event, Finish):
                self._finish = event.reason
            yield from self._blocks.add(event)

    def _stop_sequence(self) -> str | None:
        match = self._newest.stop_match if self._newest else None
        return match if isinstance(match, str) and self._finish == "stop" else None

    def _stop_reason(self) -> str:
        if self._finish == "tool_calls":
            return "tool_use"
        if self._finish == "stop":
            return "end_turn" if self._stop_sequence() is None else "stop_sequence"
        return "model_context_window_exceeded" if self._clipped else "max_tokens"

    def _usage(self) -> Usage:
        assert self._newest is not None, "an answer has at least one output"
        return _usage(self._newest, self._thinking_tokens)


class _Blocks:
    """An answer's content blocks, in order; `add` gives what is new as events."""

    def __init__(self, show_thinking: bool) -> None:
        self._done: list[dict[str, Any]] = []
        self._open: str | None = None
        self._pieces: list[str] = []
        self._show_thinking = show_thinking

    def whole(self) -> list[dict[str, Any]]:
        return self._done

    def add(self, event: SettledEvent) -> Iterator[Event]:
        match event:
            case TextDelta(text):
                yield from self._grow("text", text, {"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                shown = text if self._show_thinking else ""
                yield from self._grow("thinking", shown, {"type": "thinking_delta", "thinking": shown})
            case AnsweredCall():
                yield from self._close()
                yield from self._call(event)
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


def _newer(before: TokenOutput, now: TokenOutput) -> TokenOutput:
    """Counts never shrink: an aborted answer's last output has none."""
    return msgspec.structs.replace(
        now,
        prompt_tokens=max(before.prompt_tokens, now.prompt_tokens),
        cached_tokens=max(before.cached_tokens, now.cached_tokens),
        completion_tokens=max(before.completion_tokens, now.completion_tokens),
    )


def _usage(output: TokenOutput, thinking: int) -> Usage:
    read = output.cached_tokens
    return Usage(output.prompt_tokens - read, output.completion_tokens, read, OutputDetails(thinking))


def _frame(event: Event) -> bytes:
    return frame(msgspec.json.encode(event), event["type"])
