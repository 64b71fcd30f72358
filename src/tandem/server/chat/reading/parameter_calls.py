"""Calls whose arguments stand one by one between markers. Strings are passed on as they come."""

from __future__ import annotations

from collections.abc import Callable

from tandem.server.chat.events import CallOutcome
from tandem.server.chat.formats.tool_format import Parameters, ToolFormat
from tandem.server.chat.reading.calls import CallWriter, quoted
from tandem.server.chat.reading.json_calls import MAX_NAME
from tandem.server.chat.reading.source import AnswerSource, Reading
from tandem.server.chat.reading.values import json_of


def read_parameters(
    source: AnswerSource, syntax: Parameters, tool_format: ToolFormat, call: CallWriter
) -> Reading[CallOutcome | None]:
    """None: no call has begun."""
    name = yield from _name(source, syntax, tool_format)
    if not call.knows(name):
        return None
    call.start(name)
    separator = "{"
    while True:
        yield from source.space()
        if not (yield from source.literal((syntax.open,))):
            break
        outcome = yield from _parameter(source, syntax, tool_format, call, separator)
        if outcome != "complete":
            return outcome
        separator = ", "
    return (yield from _end(source, tool_format, call, separator))


def _name(source: AnswerSource, syntax: Parameters, tool_format: ToolFormat) -> Reading[str]:
    pieces: list[str] = []
    ends = (*syntax.name_end, syntax.open, *tool_format.close)
    stop = yield from source.until(ends, pieces.append, MAX_NAME)
    if stop in syntax.name_end:
        yield from source.literal((stop,))
    return "".join(pieces).strip() if stop else ""


def _end(source: AnswerSource, tool_format: ToolFormat, call: CallWriter, separator: str) -> Reading[CallOutcome]:
    """Behind the last parameter. An answer may end here without the call's own end marker."""
    ends = (*tool_format.close, *tool_format.section_close, *tool_format.openers)
    marker = yield from source.behind_space(ends)
    if not marker and (source.text or source.cut):
        return source.broken()
    call.arguments("{}" if separator == "{" else "}")
    return "complete"


def _parameter(
    source: AnswerSource, syntax: Parameters, tool_format: ToolFormat, call: CallWriter, separator: str
) -> Reading[CallOutcome]:
    pieces: list[str] = []
    stop = yield from source.until(tuple(syntax.key_end), pieces.append, MAX_NAME)
    if not stop:
        return source.broken()
    yield from source.literal((stop,))
    if syntax.value_open:
        yield from source.space()
        if not (yield from source.literal((syntax.value_open,))):
            return source.broken()
    key, kind = "".join(pieces).strip(), syntax.key_end[stop]
    types = call.types(key) if kind == "schema" else frozenset({"string"} if kind == "string" else ())
    call.arguments(f"{separator}{quoted(key)}: ")
    value = _Value(call.arguments, types, syntax.trim, call.choices(key))
    outcome = yield from _read_value(source, syntax, tool_format, value)
    value.end(outcome)
    return outcome


def _read_value(
    source: AnswerSource, syntax: Parameters, tool_format: ToolFormat, value: _Value
) -> Reading[CallOutcome]:
    """A value may say its own end marker: the one that counts is followed by what may follow a parameter."""
    follows = tuple(
        syntax.close + marker for marker in (syntax.open, *tool_format.close, *tool_format.section_close)
    )
    while True:
        stop = yield from source.until((syntax.close,), value.say, say_open_end=False)
        if not stop:
            return source.broken()
        if (yield from _is_last(source, syntax.close, follows)):
            source.take(len(syntax.close))
            return "complete"
        value.say(source.take(len(syntax.close)))


def _is_last(source: AnswerSource, close: str, follows: tuple[str, ...]) -> Reading[bool]:
    """Whether the end marker that comes is followed, behind white space, by one of these."""
    while True:
        rest = close + source.text[len(close) :].lstrip()
        if any(rest.startswith(marker) for marker in follows):
            return True
        if source.ended or not any(marker.startswith(rest) for marker in follows):
            return any(marker.startswith(rest) for marker in follows)
        yield


class _Value:
    """One value's text, passed on as JSON: at once where it can only be a string, else when it has ended.

    Models write white space around a value. A string may have it, but not one of `choices`.
    """

    def __init__(
        self, emit: Callable[[str], None], types: frozenset[str], trim: bool, choices: frozenset[str]
    ) -> None:
        self._choices = choices
        self._emit = emit
        self._types = types
        self._trim = trim
        self._begun = False
        self._held = ""  # of a string, a line break that may be its last; else all of it
        self._is_string = types == {"string"} and not choices
        if self._is_string:
            emit('"')

    def say(self, text: str) -> None:
        if self._trim and not self._begun and text:
            self._begun, text = True, text.removeprefix("\n")
        if not self._is_string:
            self._held += text
            return
        text = self._held + text
        self._held = "\n" if self._trim and text.endswith("\n") else ""
        self._emit(quoted(text.removesuffix(self._held))[1:-1])

    def end(self, outcome: CallOutcome) -> None:
        if outcome != "complete":
            return
        if self._is_string:
            self._emit('"')
            return
        text = self._held.removesuffix("\n") if self._trim else self._held
        chosen = text.strip() in self._choices
        self._emit(quoted(text.strip()) if chosen else json_of(text, self._types))
