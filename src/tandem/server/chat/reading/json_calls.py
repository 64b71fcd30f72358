"""Calls whose arguments are JSON: an object with the name in it, or an object behind the name."""

from __future__ import annotations

import json
import re

from tandem.server.chat.events import CallOutcome
from tandem.server.chat.formats.tool_format import NamedJson, NameThenJson
from tandem.server.chat.reading.calls import CallWriter
from tandem.server.chat.reading.json_text import read_any, read_json, read_string
from tandem.server.chat.reading.source import AnswerSource, Reading

MAX_NAME = 256  # characters of a name with what belongs to it
_OTHER_KEYS = frozenset(("type", "id", "index"))  # that calls have and that say nothing here


class _Fields:
    """Fields of a call's object so far."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None  # that came before the name, or as a string
        self.written: CallOutcome | None = None  # what became of arguments that were passed on as they came


def read_named_json(source: AnswerSource, syntax: NamedJson, call: CallWriter) -> Reading[CallOutcome | None]:
    """None: no call has begun, as with keys that no call has: most objects are not calls."""
    if not (yield from source.literal(("{",))):
        return None
    fields = _Fields()
    while True:
        yield from source.space()
        key = yield from read_string(source)
        if key is None or not (yield from _colon(source)):
            return fields.written
        if not (yield from _value(source, syntax, key, fields, call)):
            return fields.written
        yield from source.space()
        if not (yield from source.literal((",",))):
            break
    if (yield from source.literal(("}",))) and fields.written is None:
        return _written_at_once(fields, call)
    return fields.written  # whole arguments make a call, even if what is around them is not


def _colon(source: AnswerSource) -> Reading[bool]:
    yield from source.space()
    colon = yield from source.literal((":",))
    yield from source.space()
    return bool(colon)


def _value(source: AnswerSource, syntax: NamedJson, key: str, fields: _Fields, call: CallWriter) -> Reading[bool]:
    """Whether the object may go on."""
    if key in syntax.name_keys and fields.name is None:
        fields.name = yield from read_string(source)
        return fields.name is not None and call.knows(fields.name)
    if key not in syntax.argument_keys:
        return key in _OTHER_KEYS and (yield from read_any(source)) is not None
    if fields.written or fields.arguments is not None:
        return False
    if fields.name is not None and (yield from source.peek()) == "{":
        call.start(fields.name)
        fields.written = yield from read_json(source, call.arguments)
        return fields.written == "complete"
    fields.arguments = yield from read_any(source)
    return fields.arguments is not None


def _written_at_once(fields: _Fields, call: CallWriter) -> CallOutcome | None:
    """Arguments may also come before the name, as a string that holds JSON, or not at all."""
    text = "{}" if fields.arguments in (None, "null") else str(fields.arguments)
    if text.startswith('"'):
        text = str(json.loads(text))
    if fields.name is None or not _is_object(text):
        return None
    call.start(fields.name)
    call.arguments(text)
    return "complete"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_name_then_json(
    source: AnswerSource, syntax: NameThenJson, call: CallWriter, keep_id: bool
) -> Reading[CallOutcome | None]:
    """`keep_id`: what stands for the name is the call's id."""
    pieces: list[str] = []
    stop = yield from source.until(syntax.name_end, pieces.append, MAX_NAME)
    written = "".join(pieces).strip()
    match = re.fullmatch(syntax.name, written, re.DOTALL) if stop else None
    if match is None or not call.knows(match["name"].strip()):
        return None
    yield from source.literal(syntax.name_end)
    yield from source.space()
    if syntax.open:
        yield from source.literal(syntax.open)
        yield from source.space()
    if (yield from source.peek()) != "{":
        return None
    call.start(match["name"].strip(), written if keep_id else match.groupdict().get("id"))
    outcome = yield from read_json(source, call.arguments)
    if outcome == "complete" and syntax.close:
        yield from source.space()
        yield from source.literal(syntax.close)
    return outcome
