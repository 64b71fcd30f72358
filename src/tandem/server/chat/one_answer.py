"""`OneAnswer`: what every chat dialect reads an answer with."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.engine.protocol import TokenOutput
from tandem.server.chat.answer_parser import AnswerParser
from tandem.server.chat.events import ChatEvent, Finish, ReasoningDelta
from tandem.server.chat.settled import SettledCalls, SettledEvent


class OneAnswer:
    """One answer as it comes: its events, and what was counted. `finish` is right once the last output has come."""

    def __init__(self, parser: AnswerParser) -> None:
        self.finish = "stop"
        self.stop_match: str | int | None = None
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.reasoning_tokens = 0
        self._parser = parser
        self._settled = SettledCalls()

    def settled(self, outputs: Iterable[TokenOutput]) -> list[SettledEvent]:
        """What is new. The last of all is `Finish`."""
        return [event for output in outputs for event in self._settled.push(self.events(output))]

    def events(self, output: TokenOutput) -> list[ChatEvent]:
        """The same, with calls as the model writes them."""
        self._count(output)
        events = self._parser.push(output.text)
        if output.finish_reason is not None:
            events += self._parser.end(output.finish_reason)
            self.stop_match = output.stop_match
        if events and isinstance(events[0], ReasoningDelta):
            self.reasoning_tokens += len(output.token_ids)
        if events and isinstance(events[-1], Finish):
            self.finish = events[-1].reason
        return events

    def _count(self, output: TokenOutput) -> None:
        """Counts never shrink: an aborted answer's last output has none."""
        self.prompt_tokens = max(self.prompt_tokens, output.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.completion_tokens = max(self.completion_tokens, output.completion_tokens)
