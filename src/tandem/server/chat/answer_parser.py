"""`AnswerParser`: one answer's text, as it comes, to `ChatEvent`s."""

from __future__ import annotations

from typing import Protocol

from tandem.server.chat.events import ChatEvent, Finish, TextDelta


class AnswerParser(Protocol):
    """Whatever pieces the text comes in, the events say the same. Never raises; what is no call is text."""

    def push(self, text: str) -> list[ChatEvent]:
        """`text`: what `TokenOutput.text` adds."""
        ...

    def end(self, reason: str) -> list[ChatEvent]:
        """No more text comes. `reason` is the engine's; the last event is `Finish`, which may say "tool_calls"."""
        ...


class PlainText:
    """Where neither reasoning nor calls are looked for."""

    def push(self, text: str) -> list[ChatEvent]:
        return [TextDelta(text)] if text else []

    def end(self, reason: str) -> list[ChatEvent]:
        return [Finish(reason)]
