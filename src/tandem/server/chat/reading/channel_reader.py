"""`ChannelReader`: one answer of a model that says everything in channels (OpenAI's harmony)."""

from __future__ import annotations

import re

from tandem.server.chat.formats.tool_format import Channels
from tandem.server.chat.reading.calls import CallWriter
from tandem.server.chat.reading.json_text import read_json
from tandem.server.chat.reading.shown_text import ShownText
from tandem.server.chat.reading.source import AnswerSource, Reading

_MAX_HEADER = 512  # characters between two markers


class ChannelReader:
    """The prompt has begun the first message: its role is said already.

    `split` False: reasoning is text. A message to a tool that is not known is text, with its markers.
    """

    def __init__(self, source: AnswerSource, sink: ShownText, call: CallWriter, syntax: Channels, split: bool) -> None:
        self._source = source
        self._sink = sink
        self._call = call
        self._syntax = syntax
        self._split = split
        self._begins = (syntax.start, syntax.channel, syntax.message, syntax.recipient)
        self._channel = re.compile(re.escape(syntax.channel) + r"\s*(\w+)")
        self._recipient = re.compile(re.escape(syntax.recipient) + r"([^\s<]+)")

    def run(self) -> Reading[None]:
        source = self._source
        while (yield from source.peek()):
            source.mark()
            if (yield from source.behind_space(self._begins)):
                yield from self._message()
            else:
                yield from self._text()

    def _text(self) -> Reading[None]:
        """Up to the next marker; an end marker belongs to nobody."""
        source, syntax = self._source, self._syntax
        stop = yield from source.until((*syntax.end, syntax.start, syntax.channel), self._sink.say)
        if stop in syntax.end:
            self._sink.marker(source.take(len(stop)))

    def _message(self) -> Reading[None]:
        source, syntax = self._source, self._syntax
        stop = yield from source.until((syntax.message, *syntax.end), _ignore, _MAX_HEADER)
        if stop != syntax.message:
            self._no_message()
            return
        header = source.consumed
        source.take(len(stop))
        name = self._recipient.search(header)
        if name and self._call.knows(name[1]):
            yield from self._tool_call(name[1])
            return
        channel = self._channel.search(header)
        if name or (channel and channel[1] not in (*syntax.reasoning, *syntax.answer)):
            self._sink.reasoning = False
            self._sink.say(source.consumed)
        else:
            self._sink.marker(source.consumed)
            self._sink.reasoning = self._split and channel is not None and channel[1] in syntax.reasoning
        yield from self._text()

    def _tool_call(self, name: str) -> Reading[None]:
        source = self._source
        yield from source.space()
        if (yield from source.peek()) != "{":
            self._sink.reasoning = False
            self._sink.say(source.consumed)
            return
        self._call.start(name)
        outcome = yield from read_json(source, self._call.arguments)
        if outcome == "complete":
            source.take_behind_space((yield from source.behind_space(self._syntax.end)))
        self._call.end(outcome, source.consumed)

    def _no_message(self) -> None:
        """No header: its first marker is text."""
        source = self._source
        source.put_back()
        rest = source.text.lstrip()
        marker = next((m for m in self._begins if rest.startswith(m)), rest[:1])
        self._sink.reasoning = False
        self._sink.say(source.take_behind_space(marker))


def _ignore(text: str) -> None:
    pass
