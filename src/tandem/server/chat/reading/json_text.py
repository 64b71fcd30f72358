"""`JsonScanner`: follows JSON text character by character, and knows at once when it is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from tandem.server.chat.events import CallOutcome
from tandem.server.chat.reading.source import AnswerSource, Reading

MAX_DEPTH = 128

# A pair of surrogates, half of one, or any other escape. Without the others, what follows "\\\\" would be half of one.
_ESCAPED = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)

State = Literal["more", "done", "bad"]

ATOM = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ATOM_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_SPACE = frozenset(" \t\r\n")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """One value. Strict (RFC 8259): no NaN, no comments, no control characters in strings."""

    def __init__(self) -> None:
        self._open: list[str] = []  # "{" and "[" that are not closed
        self._expect = self._value
        self._atom = ""
        self._hex = 0
        self._is_key = False

    def feed(self, char: str) -> State:
        """ "done": `char` was the value's last. Numbers have no end of their own: at top level they are not taken."""
        return self._expect(char)

    def _value(self, char: str) -> State:
        if char in _SPACE:
            return "more"
        if char in "{[":
            return self._enter(char)
        if char == '"':
            self._is_key, self._expect = False, self._string
            return "more"
        if char in _ATOM_CHARS and self._open:
            self._atom, self._expect = char, self._in_atom
            return "more"
        return "bad"

    def _enter(self, char: str) -> State:
        if len(self._open) >= MAX_DEPTH:
            return "bad"
        self._open.append(char)
        self._expect = self._first_key if char == "{" else self._first_item
        return "more"

    def _first_item(self, char: str) -> State:
        return self._close(char) if char == "]" else self._value(char)

    def _first_key(self, char: str) -> State:
        return self._close(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> State:
        if char == '"':
            self._is_key, self._expect = True, self._string
            return "more"
        return "more" if char in _SPACE else "bad"

    def _colon(self, char: str) -> State:
        if char == ":":
            self._expect = self._value
            return "more"
        return "more" if char in _SPACE else "bad"

    def _after(self, char: str) -> State:
        if char == ",":
            self._expect = self._key if self._open[-1] == "{" else self._value
            return "more"
        return "more" if char in _SPACE else self._close(char)

    def _close(self, char: str) -> State:
        if char + self._open[-1] not in ("}{", "]["):
            return "bad"
        self._open.pop()
        return self._ended()

    def _ended(self) -> State:
        self._expect = self._after
        return "more" if self._open else "done"

    def _string(self, char: str) -> State:
        if char == '"':
            if self._is_key:
                self._expect = self._colon
                return "more"
            return self._ended()
        if char == "\\":
            self._expect = self._escape
        return "more" if char >= " " else "bad"

    def _escape(self, char: str) -> State:
        self._expect = self._string
        if char == "u":
            self._hex, self._expect = 4, self._hex_digit
            return "more"
        return "more" if char in _ESCAPES else "bad"

    def _hex_digit(self, char: str) -> State:
        self._hex -= 1
        if self._hex == 0:
            self._expect = self._string
        return "more" if char in _HEX else "bad"

    def _in_atom(self, char: str) -> State:
        if char in _ATOM_CHARS:
            self._atom += char
            return "more" if len(self._atom) < 400 else "bad"
        if not ATOM.fullmatch(self._atom):
            return "bad"
        self._expect = self._after
        return self._after(char)


def without_lone_surrogates(text: str) -> str:
    """JSON text whose strings are Unicode: what escapes half a character becomes U+FFFD. UTF-8 cannot say it."""
    if "\\u" in text:
        text = _ESCAPED.sub(lambda match: "\\ufffd" if match[1] else match[0], text)
    return well_formed(text)


def well_formed(text: str) -> str:
    """The same with U+FFFD for lone surrogates that stand in the text themselves."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def read_json(source: AnswerSource, say: Callable[[str], None]) -> Reading[CallOutcome]:
    """Takes one object, array or string, and gives it to `say` as it comes. Where it breaks, the rest is not taken."""
    scanner = JsonScanner()
    while True:
        count, state = _scan(scanner, source.text)
        if count:
            say(source.take(count))
        if state != "more":
            return "complete" if state == "done" else "malformed"
        if source.ended:
            return source.broken()
        yield


def _scan(scanner: JsonScanner, text: str) -> tuple[int, State]:
    """How much of the text belongs to the value."""
    for count, char in enumerate(text):
        state = scanner.feed(char)
        if state == "done":
            return count + 1, state
        if state == "bad":
            return count, state
    return len(text), "more"


def read_string(source: AnswerSource) -> Reading[str | None]:
    """A JSON string's value; None if none comes."""
    if (yield from source.peek()) != '"':
        return None
    parts: list[str] = []
    outcome = yield from read_json(source, parts.append)
    return str(json.loads("".join(parts))) if outcome == "complete" else None


def read_any(source: AnswerSource) -> Reading[str | None]:
    """Any JSON value as text; None if it is none."""
    first = yield from source.peek()
    parts: list[str] = []
    if first in ("{", "[", '"'):
        outcome = yield from read_json(source, parts.append)
        return "".join(parts) if outcome == "complete" else None
    while (yield from source.peek()) in _ATOM_CHARS and source.text and len(parts) < 400:
        parts.append(source.take(1))
    text = "".join(parts)
    return text if ATOM.fullmatch(text) else None
