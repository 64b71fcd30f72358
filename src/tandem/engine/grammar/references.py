"""The parts of a JSON schema: where schemas stand in it, where its references lead, which of them come to an end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from tandem.errors import RequestError

MOST_PLACE = 200  # characters that say where something is

Schema = dict[str, Any]

UNIONS = ("anyOf", "oneOf", "allOf")
ONE = (
    "items", "additionalItems", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
LISTS = ("prefixItems", *UNIONS)
MAPS = ("properties", "patternProperties", "$defs", "definitions")


def reached(schema: Any) -> Iterator[tuple[str, Any, int]]:
    """Every schema in a schema, once: its place, itself, its depth. With what references lead to, wherever that stands:
    OpenAPI has it in `#/components`. References to nowhere are left to `target`."""
    waiting: list[tuple[str, Any, int]] = [("#", schema, 0)]
    visited: set[int] = set()
    while waiting:
        place, part, depth = waiting.pop()
        if id(part) in visited:
            continue
        yield place, part, depth
        if isinstance(part, dict):
            visited.add(id(part))
            waiting += [(f"{place}/{key}"[:MOST_PLACE], each, depth + 1) for key, each in children(part)]
            waiting += _led_to(schema, part)


def _led_to(schema: Any, part: Schema) -> Iterator[tuple[str, Any, int]]:
    ref = part.get("$ref")
    with suppress(RequestError):
        if isinstance(ref, str):
            yield ref[:MOST_PLACE], target(schema, ref, ""), ref.count("/")


def children(part: Schema) -> Iterator[tuple[str, Any]]:
    """The schemas that stand in a schema, by their places in it."""
    for name in (*ONE, *LISTS, *MAPS):
        value = part.get(name)
        if name in MAPS and isinstance(value, dict):
            yield from ((f"{name}/{key}", each) for key, each in value.items())
        elif isinstance(value, list):
            yield from ((f"{name}/{i}", each) for i, each in enumerate(value))
        elif isinstance(value, dict):
            yield name, value


def target(schema: Any, ref: Any, place: str) -> Any:
    """Part of the schema that `ref` points to. Raises RequestError for a reference to nowhere in it."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise RequestError(f"{place[:MOST_PLACE]}: $ref must be '#' or begin with '#/', not {ref!r:.100}")
    node = schema
    for name in ref.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            raise RequestError(f"{place[:MOST_PLACE]}: $ref {ref[:100]!r} is nowhere in the schema")
    if not isinstance(node, dict | bool):
        raise RequestError(f"{place[:MOST_PLACE]}: $ref {ref[:100]!r} leads to what is no schema")
    return node


def ending_of(refs: dict[str, Any], rounds: int) -> set[str]:
    """References that something finite matches. One that takes more rounds to find out counts as such. A part is looked
    at once a round, however many references spell it."""
    spellings: dict[int, list[str]] = {}
    for ref, part in refs.items():
        spellings.setdefault(id(part), []).append(ref)
    ending: set[str] = set()
    for _ in range(rounds):
        added = [each for each in spellings.values() if each[0] not in ending and ends(refs[each[0]], ending)]
        if not added:
            return ending
        ending.update(*added)
    return set(refs)


def ends(part: Any, ending: set[str]) -> bool:
    """Whether something finite matches, if these references end."""
    if not isinstance(part, dict) or "enum" in part or "const" in part:
        return True
    if "$ref" in part:
        return unquote(part["$ref"]) in ending
    for name in ("anyOf", "oneOf"):
        if name in part:
            return any(ends(each, ending) for each in part[name])
    must = list(part.get("allOf", ()))
    known = part.get("properties", {})
    if part.get("type", "object") == "object":
        must += [known[name] for name in dict.fromkeys(part.get("required", ())) if name in known]
    if part.get("type") == "array" and part.get("minItems", 0) > 0:
        must.append(part.get("items"))
    return all(ends(each, ending) for each in must)
