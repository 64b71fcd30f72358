"""Calls in Python's syntax, and in that of Gemma. A call is passed on when it has ended."""

from __future__ import annotations

import ast
import json
import warnings

from tandem.server.chat.events import CallOutcome
from tandem.server.chat.formats.tool_format import Pairs
from tandem.server.chat.reading.calls import CallWriter, quoted
from tandem.server.chat.reading.json_calls import MAX_NAME
from tandem.server.chat.reading.json_text import ATOM, MAX_DEPTH, State
from tandem.server.chat.reading.source import AnswerSource, Reading

_MAX_CALL = 1 << 18  # characters of a call that is read as a whole
_PAIRS = {"{": "}", "[": "]", "(": ")"}


# --- Python


def read_python_calls(source: AnswerSource, call: CallWriter) -> Reading[CallOutcome | None]:
    """`[f(a=1), g()]`, all of it: it becomes calls only if every part is one. None: it is none."""
    pieces: list[str] = []
    if not (yield from _balanced(source, pieces, "\"'")):
        return None
    calls = _python_calls("".join(pieces))
    if not calls or not all(call.knows(name) for name, _ in calls):
        return None
    for index, (name, arguments) in enumerate(calls):
        call.start(name)
        call.arguments(arguments)
        if index < len(calls) - 1:
            call.end("complete", "")
    return "complete"


def _python_calls(text: str) -> list[tuple[str, str]]:
    try:
        with warnings.catch_warnings():  # of the model's escape sequences
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
        listed = tree.elts if isinstance(tree, ast.List) else []
        return [_python_call(one) for one in listed]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError
    values = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    return ast.unparse(node.func), json.dumps(values, ensure_ascii=False, allow_nan=False)


def _balanced(source: AnswerSource, pieces: list[str], quotes: str) -> Reading[bool]:
    """Takes from one bracket to its partner. Strings between `quotes` may have any brackets in them."""
    brackets, size = _Brackets(quotes), 0
    while size < _MAX_CALL:
        if not (yield from source.peek()):
            return False
        count, state = brackets.scan(source.text)
        pieces.append(source.take(count))
        size += count
        if state != "more":
            return state == "done"
    return False


class _Brackets:
    def __init__(self, quotes: str) -> None:
        self._quotes = quotes
        self._partners: list[str] = []  # of brackets that are open
        self._quote = ""
        self._escaped = False

    def scan(self, text: str) -> tuple[int, State]:
        for count, char in enumerate(text, 1):
            if not self._feed(char) or len(self._partners) > MAX_DEPTH:
                return count, "bad"
            if not self._partners:
                return count, "done"
        return len(text), "more"

    def _feed(self, char: str) -> bool:
        if self._quote:
            if char == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = char == "\\" and not self._escaped
        elif char in self._quotes:
            self._quote = char
        elif char in _PAIRS:
            self._partners.append(_PAIRS[char])
        elif char in "}])":
            return bool(self._partners) and self._partners.pop() == char
        return True


# --- Gemma


def read_pairs(source: AnswerSource, syntax: Pairs, call: CallWriter) -> Reading[CallOutcome | None]:
    """`f{key:value,…}`, pair by pair."""
    pieces: list[str] = []
    stop = yield from source.until(("{",), pieces.append, MAX_NAME)
    name = "".join(pieces).strip()
    if not stop or not call.knows(name):
        return None
    source.take(1)
    call.start(name)
    separator = "{"
    while True:
        yield from source.space()
        if (yield from source.literal(("}",))):
            call.arguments("{}" if separator == "{" else "}")
            return "complete"
        if separator != "{" and not (yield from source.literal((",",))):
            return source.broken()
        yield from source.space()
        key = yield from _key(source, syntax.quote)
        value = None if key is None else (yield from _pair_value(source, syntax.quote, 0))
        if key is None or value is None:
            return source.broken()
        call.arguments(f"{separator}{quoted(key)}: {value}")
        separator = ", "


def _key(source: AnswerSource, quote: str) -> Reading[str | None]:
    if (yield from source.next_of((quote,))):
        key = yield from _quoted(source, quote)
        yield from source.space()
        stop = yield from source.literal((":",))
        return key if stop else None
    pieces: list[str] = []
    stop = yield from source.until((":", ",", "}", "{", "[", "]", quote), pieces.append, MAX_NAME)
    if stop != ":":
        return None
    source.take(1)
    return "".join(pieces).strip() or None


def _quoted(source: AnswerSource, quote: str) -> Reading[str | None]:
    yield from source.literal((quote,))
    pieces: list[str] = []
    stop = yield from source.until((quote,), pieces.append)
    source.take(len(stop))
    return "".join(pieces) if stop else None


def _pair_value(source: AnswerSource, quote: str, depth: int) -> Reading[str | None]:
    """JSON text of a value; None if none comes."""
    yield from source.space()
    if (yield from source.next_of((quote,))):
        text = yield from _quoted(source, quote)
        return None if text is None else quoted(text)
    first = yield from source.peek()
    if first and first in "{[" and depth < MAX_DEPTH:
        return (yield from _nested(source, quote, depth + 1))
    pieces: list[str] = []
    stop = yield from source.until((",", "}", "]", "{", "[", quote), pieces.append, _MAX_CALL)
    word = "".join(pieces).strip()
    if stop not in (",", "}", "]") or not word:
        return None
    return word if ATOM.fullmatch(word) else quoted(word)


def _nested(source: AnswerSource, quote: str, depth: int) -> Reading[str | None]:
    is_map = source.take(1) == "{"
    close = "}" if is_map else "]"
    items: list[str] = []
    while True:
        yield from source.space()
        if (yield from source.literal((close,))):
            return ("{%s}" if is_map else "[%s]") % ", ".join(items)
        if items and not (yield from source.literal((",",))):
            return None
        key = (yield from _spaced_key(source, quote)) if is_map else ""
        value = None if key is None else (yield from _pair_value(source, quote, depth))
        if key is None or value is None:
            return None
        items.append(f"{quoted(key)}: {value}" if is_map else value)


def _spaced_key(source: AnswerSource, quote: str) -> Reading[str | None]:
    yield from source.space()
    return (yield from _key(source, quote))
