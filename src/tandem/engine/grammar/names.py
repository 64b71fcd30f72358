"""Rules of a JSON schema for an object's names that a grammar would not hold to.

To xgrammar, ways to name a property are alternatives. A name that fits two of them must keep to both.
"""

from __future__ import annotations

import re
from typing import Any

from tandem.engine.grammar.references import MOST_PLACE
from tandem.errors import RequestError

Schema = dict[str, Any]

_LITERAL = re.compile(r"[^\\^$.|?*+()\[\]{}]|\\[^\w\s]")  # a character that stands for itself
_FREE = ("patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties")
_REPEATED = ("*", "?", "{", "+")


def check_names(place: str, part: Schema) -> None:
    """Raises RequestError, without a field, that names the place."""
    where, listed, patterns = place[:MOST_PLACE], part.get("properties", {}), part.get("patternProperties", {})
    if "propertyNames" in part and (listed or patterns):
        raise RequestError(f"{where}: propertyNames beside other names cannot be held to; leave it out")
    ways = [(_beginning(pattern), False, pattern) for pattern in patterns]
    _check_ways(where, sorted([*ways, *((name, True, name) for name in listed)]), listed, patterns)
    _check_least(where, part)


def _check_ways(where: str, ways: list[tuple[str, bool, str]], listed: Schema, patterns: Schema) -> None:
    """ways: in order, what its names begin with; whether it is one name; itself. Of what stands before a way, those
    that may match its names are kept, the longest last. They all have the same schema."""
    prefixes: list[tuple[str, str]] = []
    for begin, single, way in ways:
        while prefixes and not begin.startswith(prefixes[-1][0]):
            prefixes.pop()
        if prefixes and patterns[prefixes[-1][1]] != (listed if single else patterns)[way]:
            what = f"pattern {prefixes[-1][1]!r:.60} and {'property' if single else 'pattern'} {way!r:.60}"
            raise RequestError(f"{where}: {what} may have the same name; begin patterns with ^ and other letters")
        if not single:
            prefixes.append((begin, way))


def _beginning(pattern: str) -> str:
    """Literal text that every name begins with where the pattern matches. The pattern is not run: it may take a name
    for ever."""
    if not pattern.startswith("^") or "|" in pattern:
        return ""
    prefix, at = "", 1
    while piece := _LITERAL.match(pattern, at):
        at = piece.end()
        if pattern.startswith(_REPEATED, at):
            break
        prefix += piece[0][-1]
    return prefix


def _check_least(where: str, part: Schema) -> None:
    """A name that the schema does not list may come twice. It counts once."""
    least, required = part.get("minProperties", 0), len(set(part.get("required", ())))
    free = any(part.get(name) not in (None, False) for name in _FREE) or not part.get("properties")
    if free and least > required + 1 and "object" in part.get("type", "object"):
        raise RequestError(
            f"{where}: minProperties of {least} cannot be held to where names are free; list more of them in required"
        )
