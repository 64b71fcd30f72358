"""`ChatEvent`: what an answer consists of, in order, in no dialect's words; and `ChatAnswer`, all of it together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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
    """No more arguments come. `complete` False: they are no JSON object; `raw` is what the model wrote instead."""

    index: int
    complete: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event. `reason`: "stop" | "length" | "tool_calls" | "abort" | "error"."""

    reason: str


ChatEvent = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | Finish


@dataclass(slots=True)
class AnsweredCall:
    """One call of a whole answer. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """A whole answer: what its events add up to.

    A call that the model did not write as the format wants is text here. A stream has told of it already.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[AnsweredCall] = field(default_factory=list)
    finish_reason: str = "stop"


def whole_answer(events: Iterable[ChatEvent]) -> ChatAnswer:
    """`events`: all of one answer, in order."""
    answer, cut = ChatAnswer(), False
    for event in events:
        match event:
            case ReasoningDelta(text):
                answer.reasoning += text
            case TextDelta(text):
                answer.text += text
            case ToolCallStart(_, call_id, name):
                answer.calls.append(AnsweredCall(call_id, name))
            case ToolCallArguments(_, fragment):
                answer.calls[-1].arguments += fragment
            case ToolCallEnd(_, complete, raw):
                if not complete:
                    answer.calls.pop()
                    answer.text += raw
                    cut = True
            case Finish(reason):
                answer.finish_reason = reason
    if cut and not answer.calls and answer.finish_reason == "tool_calls":
        answer.finish_reason = "stop"
    return answer
