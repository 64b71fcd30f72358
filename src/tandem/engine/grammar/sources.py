"""`Grammar`s of what users give: JSON schemas, regular expressions, choices, grammars, structural tags."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tandem.engine.grammar.schema import check_schema
from tandem.engine.protocol import Grammar
from tandem.errors import RequestError

MOST_CHARS = 512 << 10
SMALL_CHARS = 4096
_LARGE_COUNT = re.compile(r'(Length|Items|Properties)"\s*:\s*\d{3}|\{\d*,?\d{3}')  # of a schema, of a pattern

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def json_schema(schema: str | bool | dict[str, Any]) -> Grammar:
    """schema: JSON text or what it stands for. `check` says whether answers can be held to it."""
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema(ANY_OBJECT)


def choice(texts: Sequence[str]) -> Grammar:
    """One of several texts. Raises RequestError, without a field."""
    if not texts or not all(texts):
        raise RequestError("a choice needs texts, and none of them may be empty")
    return Grammar("ebnf", f"root ::= {' | '.join(map(_quoted, dict.fromkeys(texts)))}")


def is_small(grammar: Grammar) -> bool:
    """Whether compiling it takes little: it is short, and counts nothing to a hundred. As far as can be seen."""
    return len(grammar.text) <= SMALL_CHARS and _LARGE_COUNT.search(grammar.text) is None


def _quoted(text: str) -> str:
    """A text of a grammar: letters and digits as they are, all else by its number."""
    return (
        '"'
        + "".join(char if char.isalnum() and char.isascii() else f"\\U{ord(char):08x}" for char in text)
        + '"'
    )


def check(grammar: Grammar) -> None:
    """Cheap: what compiling would find out is left to it. Raises RequestError, without a field."""
    if len(grammar.text) > MOST_CHARS:
        raise RequestError(f"{grammar.kind} has more than {MOST_CHARS >> 10} thousand characters")
    if not grammar.text.strip():
        raise RequestError(f"{grammar.kind} is empty")
    if "\0" in grammar.text:
        raise RequestError(f"{grammar.kind} has a character that is no text")
    if grammar.kind == "json_schema":
        _check_schemas([_decoded(grammar)], grammar.lenient)
    elif grammar.kind == "structural_tag":
        tag = _decoded(grammar)
        if not isinstance(tag, dict):
            raise RequestError("a structural tag is an object")
        _check_schemas(schemas_in(tag), grammar.lenient)


def schemas_in(tag: Any) -> Iterator[Any]:
    """All JSON schemas of a structural tag."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict) and part.get("type") == "json_schema" and "json_schema" in part:
            yield part["json_schema"]
        elif isinstance(part, dict):
            waiting += part.values()


def _check_schemas(schemas: Iterable[Any], lenient: bool) -> None:
    if not lenient:
        for schema in schemas:
            check_schema(schema)


def _decoded(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{grammar.kind} is not valid JSON: {error}") from error
