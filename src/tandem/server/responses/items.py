"""`Items`: a response's output items as they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tandem.server.chat.collect import AnsweredCall, CollectedEvent, CutCall
from tandem.server.chat.conversation import Message, ToolCall
from tandem.server.chat.events import Finish, ReasoningDelta, TextDelta
from tandem.server.openai_sampling import new_id
from tandem.server.responses.tools import Offer, OfferedTools, text_input

Event = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """The message or the reasoning that is being written."""

    id: str
    reasoning: bool
    pieces: list[str] = field(default_factory=list)

    def part(self, text: str) -> dict[str, Any]:
        if self.reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, status: str, *parts: dict[str, Any]) -> dict[str, Any]:
        if self.reasoning:
            return {"type": "reasoning", "id": self.id, "summary": [], "content": [*parts], "status": status}
        return {
            "type": "message", "id": self.id, "role": "assistant", "content": [*parts], "status": status,
        }  # fmt: skip

    @property
    def name(self) -> str:
        """Name of its events."""
        return "response.reasoning_text" if self.reasoning else "response.output_text"


class Items:
    def __init__(self, offer: Offer) -> None:
        """offer: the tools that may be called."""
        self.done: list[dict[str, Any]] = []
        self._offer = offer
        self._calls: list[ToolCall] = []
        self._open: _Open | None = None

    def add(self, event: CollectedEvent) -> Iterator[Event]:
        match event:
            case TextDelta(text):
                yield from self._grow(text, reasoning=False)
            case ReasoningDelta(text):
                yield from self._grow(text, reasoning=True)
            case CutCall(name=name, raw=raw) if self._offer[name].custom:  # any text looks like its input
                yield from self._grow(raw, reasoning=False)
            case AnsweredCall() | CutCall():
                yield from self._close("completed")
                yield from self._call(event)
            case Finish(reason):
                yield from self._close("completed" if reason in ("stop", "tool_calls") else "incomplete")

    def message(self) -> Message:
        """For what comes after this response. Nobody can answer a call that was cut, so it is left out."""
        texts: dict[str, list[str]] = {"message": [], "reasoning": []}
        for item in self.done:
            if item["type"] in texts:
                texts[item["type"]].append(item["content"][0]["text"])
        reasoning = "".join(texts["reasoning"]) or None
        return Message("assistant", "".join(texts["message"]), reasoning=reasoning, tool_calls=tuple(self._calls))

    def _grow(self, text: str, reasoning: bool) -> Iterator[Event]:
        if self._open is None or self._open.reasoning != reasoning:
            yield from self._close("completed")
            self._open = _Open(new_id("rs" if reasoning else "msg"), reasoning)
            yield self._item("added", self._open.item("in_progress"))
            yield self._of_part(self._open, "response.content_part.added", part=self._open.part(""))
        self._open.pieces.append(text)
        logprobs = {} if reasoning else {"logprobs": list[Any]()}
        yield self._of_part(self._open, f"{self._open.name}.delta", delta=text, **logprobs)

    def _close(self, status: str) -> Iterator[Event]:
        one = self._open
        if one is None:
            return
        text = "".join(one.pieces)
        logprobs = {} if one.reasoning else {"logprobs": list[Any]()}
        yield self._of_part(one, f"{one.name}.done", text=text, **logprobs)
        yield self._of_part(one, "response.content_part.done", part=one.part(text))
        item = one.item(status, one.part(text))
        yield self._item("done", item)
        self.done.append(item)
        self._open = None

    def _call(self, call: AnsweredCall | CutCall) -> Iterator[Event]:
        """In one piece. A client runs only what is completed."""
        whole, offered = isinstance(call, AnsweredCall), self._offer[call.name]
        skeleton, key, name = _begun(call.id, offered)
        text = text_input(call.arguments) if offered.custom else call.arguments
        place = {"item_id": skeleton["id"], "output_index": len(self.done)}
        yield self._item("added", skeleton | {"status": "in_progress"})
        yield {"type": f"{name}.delta", **place, "delta": text}
        if whole:
            self._calls.append(ToolCall(call.id, call.name, call.arguments))
            yield {"type": f"{name}.done", **place, "name": offered.name, key: text}
        item = skeleton | {key: text, "status": "completed" if whole else "incomplete"}
        yield self._item("done", item)
        self.done.append(item)

    def _item(self, what: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.output_item.{what}", "output_index": len(self.done), "item": item}

    def _of_part(self, one: _Open, kind: str, **fields: Any) -> Event:
        place = {"item_id": one.id, "output_index": len(self.done), "content_index": 0}
        return {"type": kind, **place, **fields}


def _begun(call_id: str, offered: OfferedTools) -> tuple[dict[str, Any], str, str]:
    """A call's item before its input has come, the input's name in it, and that of its events."""
    kind, key = ("custom_tool_call", "input") if offered.custom else ("function_call", "arguments")
    item = {"type": kind, "id": new_id("ctc" if offered.custom else "fc"), "call_id": call_id, "name": offered.name}
    if offered.namespace:
        item["namespace"] = offered.namespace
    return item | {key: ""}, key, f"response.{kind}_{key}"
