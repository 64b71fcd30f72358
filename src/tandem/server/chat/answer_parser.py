"""`AnswerParser`: one answer's text, as it comes, to `ChatEvent`s."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tandem.server.chat.conversation import Tool
from tandem.server.chat.events import (
    ChatEvent,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tandem.server.chat.formats.tool_format import ToolFormat
from tandem.server.chat.reading.answer_reader import AnswerReader
from tandem.server.chat.reading.calls import CallWriter
from tandem.server.chat.reading.channel_reader import ChannelReader
from tandem.server.chat.reading.shown_text import ShownText
from tandem.server.chat.reading.source import AnswerSource, Reading
from tandem.text.reasoning_format import ReasoningFormat

log = logging.getLogger("tandem.server")

_CUT = ("length", "abort", "error")


class AnswerParser(Protocol):
    """Whatever pieces the text comes in, the events say the same. Never raises; what is no call is text."""

    @property
    def reasoning(self) -> bool:
        """Whether what has come ends in reasoning."""
        ...

    def push(self, text: str) -> list[ChatEvent]:
        """`text`: what `TokenOutput.text` adds."""
        ...

    def end(self, reason: str) -> list[ChatEvent]:
        """No more text comes. `reason` is the engine's; the last event is `Finish`, which may say "tool_calls"."""
        ...


class PlainText:
    """Where neither reasoning nor calls are looked for."""

    reasoning = False

    def push(self, text: str) -> list[ChatEvent]:
        return [TextDelta(text)] if text else []

    def end(self, reason: str) -> list[ChatEvent]:
        return [Finish(reason)]


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that belongs to the format and that nobody is shown."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """How an answer is read. `tool_format` None or no `tools`: calls are text. `reasoning_format` None: reasoning is.

    `begun`: what of the answer stands in the prompt. `in_reasoning`: where it begins, or the answer without it, the
    prompt has begun reasoning. `earlier_calls`: of the conversation, for ids that count them.
    """

    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    in_reasoning: bool = False
    begun: str = ""
    parallel: bool = True
    stream_reasoning: bool = True
    earlier_calls: int = 0

    @property
    def parses(self) -> bool:
        """Whether anything but text is looked for."""
        channels = self.tool_format is not None and self.tool_format.channels is not None
        return bool(self.tools and self.tool_format) or self.reasoning_format is not None or channels

    def new_parser(self) -> AnswerParser:
        return FormattedText(self) if self.parses else PlainText()


class FormattedText:
    """Reads by `AnswerRules`. `markup` keeps what nobody is shown among the events, so that nothing is lost."""

    def __init__(self, rules: AnswerRules, markup: bool = False) -> None:
        self._rules = rules
        self._markup = markup
        self._events: list[ChatEvent | Markup] = []
        self._source = AnswerSource()
        self._shown_text = ShownText(self._source, self._events.append, self._drop)
        self._calls = 0
        self._muted = False
        self._complete = False
        self._reasoning: list[str] = []
        self._run = self._reading()
        if rules.begun:
            self._begin(rules.begun)

    def _begin(self, text: str) -> None:
        """Reads the client's beginning. Only a call in it that has no end yet is told."""
        self._source.begin(text)
        events = self._advance()
        ends = [i for i, event in enumerate(events, 1) if isinstance(event, ToolCallEnd)]
        self._events[:], self._complete = events[max(ends, default=0) :], False

    @property
    def reasoning(self) -> bool:
        return self._shown_text.reasoning

    def push(self, text: str) -> list[ChatEvent]:
        self._source.add(text)
        return self._advance()

    def end(self, reason: str) -> list[ChatEvent]:
        self._source.end(cut=reason in _CUT)
        events = self._advance()
        self._shown_text.end()
        events += self._advance()
        if self._reasoning:
            events.append(ReasoningDelta("".join(self._reasoning)))
        return [*events, Finish("tool_calls" if reason == "stop" and self._complete else reason)]

    def _advance(self) -> list[ChatEvent]:
        try:
            self._read()
        except Exception:  # an answer must not be lost for a mistake here
            log.exception("a bug in the parser of %s", self._rules)
            self._run = self._as_text()
            self._read()
        events, self._events[:] = list(self._events), []
        return [shown for event in events for shown in self._shown(event)]

    def _read(self) -> None:
        """All that has come."""
        next(self._run, None)
        while self._source.more():
            next(self._run, None)

    def _shown(self, event: ChatEvent | Markup) -> list[ChatEvent]:
        """Reasoning that is not streamed is held until something else comes."""
        if isinstance(event, Markup):
            return [event] if self._markup else []  # type: ignore[list-item]
        if isinstance(event, ReasoningDelta) and not self._rules.stream_reasoning:
            self._reasoning.append(event.text)
            return []
        held = [ReasoningDelta("".join(self._reasoning))] if self._reasoning else []
        self._reasoning.clear()
        return [*held, event]

    def _reading(self) -> Reading[None]:
        rules = self._rules
        tools = rules.tool_format if rules.tools else None
        call = CallWriter(rules.tools, tools.ids if tools else "call", self._call_event, rules.earlier_calls)
        if rules.in_reasoning and rules.reasoning_format is not None:
            self._shown_text.marker("")
            self._shown_text.reasoning = True
        if rules.tool_format and rules.tool_format.channels:
            split = rules.reasoning_format is not None
            return ChannelReader(self._source, self._shown_text, call, rules.tool_format.channels, split).run()
        return AnswerReader(self._source, self._shown_text, call, tools, rules.reasoning_format).run()

    def _as_text(self) -> Reading[None]:
        while not self._source.ended:
            self._shown_text.say(self._source.take(len(self._source.text)))
            yield
        self._shown_text.say(self._source.take(len(self._source.text)))

    def _call_event(self, event: ChatEvent) -> None:
        """A call ends reasoning. Where only one may be made, further ones are dropped."""
        if isinstance(event, ToolCallStart):
            self._shown_text.marker("")
            self._shown_text.reasoning = False
            self._muted = self._calls > 0 and not self._rules.parallel
            self._calls += 1
        if isinstance(event, ToolCallEnd):
            self._complete |= event.outcome == "complete"
            event = ToolCallEnd(event.index, event.outcome, self._source.fresh(event.raw))
            if self._muted:
                self._drop(event.raw)
        if not self._muted:
            self._events.append(event)

    def _drop(self, text: str) -> None:
        if text:
            self._events.append(Markup(text))
