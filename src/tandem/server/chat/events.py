"""`ChatEvent`: what an answer consists of, in order, in no dialect's words; and `ChatAnswer`, all of it together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class AnsweredCall:
    """One call of a whole answer. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """A whole answer: what its events add up to.

    A malformed call is text here. A stream has told of it already, and its client finds arguments that are no JSON.
    A call that was cut is a call: its finish reason says so.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[AnsweredCall] = field(default_factory=list)
    finish_reason: str = "stop"


def whole_answer(events: Iterable[ChatEvent]) -> ChatAnswer:
    """`events`: all of one answer, in order."""
    answer = ChatAnswer()
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
            case ToolCallEnd(_, "malformed", raw):
                answer.calls.pop()
                answer.text += raw
            case Finish(reason):
                answer.finish_reason = reason
    return answer
