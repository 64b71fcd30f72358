"""`CollectedCalls`: an answer's events with whole calls, for whoever cannot take a call back; `ChatAnswer`, all of it
together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.server.chat.events import (
    ChatEvent,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(slots=True)
class AnsweredCall:
    """One whole call. `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class CutCall:
    """A call that the answer's end cut. `arguments` is the begin of a JSON text; `raw`: all that the model wrote."""

    id: str
    name: str
    arguments: str
    raw: str


CollectedEvent = ReasoningDelta | TextDelta | AnsweredCall | CutCall | Finish


class CollectedCalls:
    """A call comes as a whole, when it is known to be one. A malformed call comes as text, also in a stream."""

    def __init__(self) -> None:
        self._call = AnsweredCall("", "")
        self._fragments: list[str] = []

    def push(self, events: Iterable[ChatEvent]) -> list[CollectedEvent]:
        return [collected for event in events if (collected := self._collect(event)) is not None]

    def _collect(self, event: ChatEvent) -> CollectedEvent | None:
        match event:
            case ToolCallStart(_, call_id, name):
                self._call = AnsweredCall(call_id, name)
                self._fragments.clear()
                return None
            case ToolCallArguments(_, fragment):
                self._fragments.append(fragment)
                return None
            case ToolCallEnd():
                return self._ended(event)
            case _:
                return event

    def _ended(self, end: ToolCallEnd) -> CollectedEvent | None:
        call, arguments = self._call, "".join(self._fragments)
        if end.outcome == "complete":
            return AnsweredCall(call.id, call.name, arguments)
        if end.outcome == "cut":
            return CutCall(call.id, call.name, arguments, end.raw)
        return TextDelta(end.raw) if end.raw else None


@dataclass(slots=True)
class ChatAnswer:
    """A whole answer: what its events add up to.

    A malformed call is text here. A stream of OpenAI's has told of it already, and its client finds arguments that are
    no JSON. A call that was cut is a call: its finish reason says so.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[AnsweredCall] = field(default_factory=list)
    finish_reason: str = "stop"


def whole_answer(events: Iterable[ChatEvent]) -> ChatAnswer:
    """`events`: all of one answer, in order."""
    answer = ChatAnswer()
    for event in CollectedCalls().push(events):
        match event:
            case ReasoningDelta(text):
                answer.reasoning += text
            case TextDelta(text):
                answer.text += text
            case AnsweredCall():
                answer.calls.append(event)
            case CutCall():
                answer.calls.append(AnsweredCall(event.id, event.name, event.arguments))
            case Finish(reason):
                answer.finish_reason = reason
    return answer
