"""`ChatEvent`: what an answer consists of, in order, in no dialect's words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

CallOutcome = Literal["complete", "malformed", "cut"]


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Some more of the reasoning. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Some more of the answer's text. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts an answer's calls from 0; its arguments follow, then its end."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Some more of a call's arguments, as JSON text. Never empty."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """No more arguments come. `raw` is all that the model wrote for this call.

    "complete": the arguments are a JSON object. "malformed": they are none. "cut": the answer ended before they did.
    """

    index: int
    outcome: CallOutcome
    raw: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event. `reason`: "stop" | "length" | "tool_calls" | "abort" | "error"."""

    reason: str


ChatEvent = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | Finish


def joined(events: Iterable[ChatEvent]) -> list[ChatEvent]:
    """The same with neighbours of one kind, and of one call, as one. A client gets each event as a message."""
    merged: list[ChatEvent] = []
    for event in events:
        both = _both(merged[-1], event) if merged else None
        if both is None:
            merged.append(event)
        else:
            merged[-1] = both
    return merged


def _both(one: ChatEvent, other: ChatEvent) -> ChatEvent | None:
    """None: they are two."""
    match one, other:
        case TextDelta(text), TextDelta(more):
            return TextDelta(text + more)
        case ReasoningDelta(text), ReasoningDelta(more):
            return ReasoningDelta(text + more)
        case ToolCallArguments(call, text), ToolCallArguments(again, more) if call == again:
            return ToolCallArguments(call, text + more)
    return None
