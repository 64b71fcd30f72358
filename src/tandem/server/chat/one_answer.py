"""`OneAnswer`: what every chat dialect reads an answer with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tandem.engine.protocol import TokenOutput
from tandem.server.chat.answer_parser import AnswerParser
from tandem.server.chat.collect import CollectedCalls, CollectedEvent
from tandem.server.chat.events import ChatEvent, Finish, joined


class OneAnswer:
    """One answer as it comes: its events, and what was counted. `finish` is right once the last output has come."""

    def __init__(self, parser: AnswerParser) -> None:
        self.finish = "stop"
        self.stop_match: str | int | None = None
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.reasoning_tokens = 0
        self._parser = parser
        self._calls = CollectedCalls()

    def collected(self, outputs: Iterable[TokenOutput]) -> list[CollectedEvent]:
        """New events of these outputs. The last of all is `Finish`."""
        return [event for output in outputs for event in self._calls.push(self.events(output))]

    def events(self, output: TokenOutput) -> list[ChatEvent]:
        """The same, with calls as the model writes them. What several tokens add to one text is one event."""
        self._count(output)
        events = [event for text, tokens in _pieces(output) for event in self._push(text, tokens)]
        if output.finish_reason is not None:
            events += self._parser.end(output.finish_reason)
            self.stop_match = output.stop_match
        if events and isinstance(events[-1], Finish):
            self.finish = events[-1].reason
        return joined(events)

    def _push(self, text: str, tokens: int) -> list[ChatEvent]:
        """Reasoning has its markers' tokens, too: those before which it had begun, or behind which it has."""
        begun = self._parser.reasoning
        events = self._parser.push(text)
        if begun or self._parser.reasoning:
            self.reasoning_tokens += tokens
        return events

    def _count(self, output: TokenOutput) -> None:
        """Counts never shrink: an aborted answer's last output has none."""
        self.prompt_tokens = max(self.prompt_tokens, output.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.completion_tokens = max(self.completion_tokens, output.completion_tokens)


def _pieces(output: TokenOutput) -> Iterator[tuple[str, int]]:
    """Its text by tokens, and how many tokens each piece has: several tokens of one step may come as one output."""
    if output.lengths is None:
        yield output.text, len(output.token_ids)
        return
    at = 0
    for length in output.lengths:
        yield output.text[at : at + length], 1
        at += length
    if at < len(output.text):  # what was held back until the end
        yield output.text[at:], 0
