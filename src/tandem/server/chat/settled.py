"""`SettledCalls`: an answer's events for dialects whose clients cannot take a call back."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.server.chat.events import (
    AnsweredCall,
    ChatEvent,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

SettledEvent = ReasoningDelta | TextDelta | AnsweredCall | Finish


class SettledCalls:
    """A call comes as a whole, when it is known to be one. A malformed call comes as text, also in a stream."""

    def __init__(self) -> None:
        self._call: AnsweredCall | None = None
        self._fragments: list[str] = []

    def push(self, events: Iterable[ChatEvent]) -> list[SettledEvent]:
        return [settled for event in events if (settled := self._settle(event)) is not None]

    def _settle(self, event: ChatEvent) -> SettledEvent | None:
        match event:
            case ToolCallStart(_, call_id, name):
                self._call = AnsweredCall(call_id, name)
                self._fragments.clear()
                return None
            case ToolCallArguments(_, fragment):
                self._fragments.append(fragment)
                return None
            case ToolCallEnd(_, "malformed", raw):
                return TextDelta(raw) if raw else None
            case ToolCallEnd():
                assert self._call is not None
                self._call.arguments = "".join(self._fragments)
                return self._call
            case _:
                return event
