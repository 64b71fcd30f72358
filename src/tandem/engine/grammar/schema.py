"""JSON schemas as grammars take them: `check_schema` refuses what would not be held to, `prepared` spells the rest.

A keyword that is silently ignored makes answers that the schema refuses. So it is named instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from tandem.engine.grammar.patterns import FORMATS, counted_groups
from tandem.errors import RequestError

MOST_DEPTH = 96
MOST_PARTS = 10_000  # schemas in a schema: checking holds up other requests
MOST_PLACE = 200  # characters that say where something is

Schema = dict[str, Any]

# They assert something that no grammar of xgrammar's checks. What it warns of itself is not here.
_IGNORED = (
    "uniqueItems", "contains", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef", "contentSchema",
)  # fmt: skip
_UNIONS = ("anyOf", "oneOf", "allOf")
_ASSERTIONS = {
    "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength",
    "minLength", "pattern", "format", "items", "prefixItems", "maxItems", "minItems", "properties", "patternProperties",
    "additionalProperties", "propertyNames", "required", "maxProperties", "minProperties", "$ref", *_UNIONS,
}  # fmt: skip
_ONE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
)
_LISTS = ("prefixItems", *_UNIONS)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ROUNDS, _VISITS = 64, 50_000  # of looking for what ends; visits: parts times rounds


def check_schema(schema: Any) -> None:
    """Raises RequestError, without a field, that names the place."""
    try:
        _check(schema)
    except RequestError:
        raise
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RequestError(f"a keyword of the JSON schema has a value of the wrong type ({error})") from error


def _check(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise RequestError("a JSON schema is an object")
    refs: dict[str, Any] = {}
    count = 0
    for place, part, depth in _parts(schema):
        count += 1
        if count > MOST_PARTS:
            raise RequestError(f"the schema has more than {MOST_PARTS} parts")
        if depth > MOST_DEPTH:
            raise RequestError(f"{place[:200]}: the schema is nested more than {MOST_DEPTH} deep")
        if isinstance(part, dict):
            _check_part(place, part)
            if "$ref" in part:
                target = _target(schema, part["$ref"], place)
                refs[unquote(part["$ref"])] = target
    if not _ends(schema, _ending(refs, max(2, min(_ROUNDS, _VISITS // count)))):
        raise RequestError("no answer of finite length matches the schema: it requires itself")


def prepared(schema: Any) -> Any:
    """The same schema in words that xgrammar reads rightly."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in _ONE:
        if isinstance(made.get(name), dict):
            made[name] = prepared(made[name])
    for name in _MAPS:
        if isinstance(made.get(name), dict):
            made[name] = {key: prepared(part) for key, part in made[name].items()}
    for name in (*_LISTS, "items"):
        if isinstance(made.get(name), list):
            made[name] = [prepared(part) for part in made[name]]
    made = _with_exact_patterns(_with_counted_text(_with_format(made)))
    return _with_required(_with_prefix_items(_with_type_inside(made)))


def _with_exact_patterns(schema: Schema) -> Schema:
    made = dict(schema)
    if isinstance(made.get("pattern"), str):
        made["pattern"] = counted_groups(made["pattern"])
    if isinstance(made.get("patternProperties"), dict):
        made["patternProperties"] = {counted_groups(key): part for key, part in made["patternProperties"].items()}
    return made


def _with_format(schema: Schema) -> Schema:
    """Formats of which xgrammar allows what is none: 31 November, 01.2.3.4."""
    pattern = FORMATS.get(str(schema.get("format")))
    if pattern is None or {"pattern", "enum", "const"} & set(schema):
        return schema
    return {name: part for name, part in schema.items() if name != "format"} | {"pattern": f"^{pattern}$"}


def _with_counted_text(schema: Schema) -> Schema:
    """In a text of bounded length xgrammar allows control characters, which JSON does not; in a pattern it does not."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    if (least, most) == (None, None) or {"pattern", "format", "enum", "const"} & set(schema):
        return schema
    rest = {name: part for name, part in schema.items() if name not in ("minLength", "maxLength")}
    return rest | {"pattern": f"^.{{{least or 0},{'' if most is None else most}}}$"}


def _with_required(schema: Schema) -> Schema:
    """A required property that `properties` does not list would not be required."""
    known, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(known, dict) or not isinstance(required, list) or set(required) <= set(known):
        return schema
    others = schema.get("additionalProperties", True)
    return schema | {"properties": known | {name: others for name in required if name not in known}}


def _with_prefix_items(schema: Schema) -> Schema:
    """Up to draft 2019-09 `items` may be a list."""
    if not isinstance(schema.get("items"), list):
        return schema
    rest = {name: part for name, part in schema.items() if name not in ("items", "additionalItems")}
    return rest | {"prefixItems": schema["items"], "items": schema.get("additionalItems", True)}


def _with_type_inside(schema: Schema) -> Schema:
    """A type beside anyOf counts for each of its parts."""
    for name in ("anyOf", "oneOf"):
        if name in schema and "type" in schema:
            kind = {"type": schema["type"]}
            parts = [kind | part if isinstance(part, dict) else part for part in schema[name]]
            return {key: value for key, value in schema.items() if key != "type"} | {name: parts}
    return schema


def _parts(schema: Any) -> Iterator[tuple[str, Any, int]]:
    """Every schema in a schema: its place, itself, its depth."""
    waiting: list[tuple[str, Any, int]] = [("#", schema, 0)]
    while waiting:
        place, part, depth = waiting.pop()
        yield place, part, depth
        if isinstance(part, dict):
            waiting += [(f"{place}/{key}"[:MOST_PLACE], each, depth + 1) for key, each in _children(part)]


def _children(part: Schema) -> Iterator[tuple[str, Any]]:
    for name in (*_ONE, *_LISTS, *_MAPS):
        value = part.get(name)
        if name in _MAPS and isinstance(value, dict):
            yield from ((f"{name}/{key}", each) for key, each in value.items())
        elif isinstance(value, list):
            yield from ((f"{name}/{i}", each) for i, each in enumerate(value))
        elif isinstance(value, dict):
            yield name, value


def _check_part(place: str, part: Schema) -> None:
    for name in _IGNORED:
        if name in part and part[name] is not False:
            raise RequestError(f"{place[:200]}: {name} cannot be held to; leave it out")
    for name in _MAPS:
        if not isinstance(part.get(name, {}), dict):
            raise RequestError(f"{place[:200]}: {name} must be an object")
    if part.get("minLength", 0) > part.get("maxLength", math.inf):
        raise RequestError(f"{place[:200]}: minLength is greater than maxLength")
    for name in ("$ref", *_UNIONS):
        if name in part:
            _check_alone(place, part, name)


def _check_alone(place: str, part: Schema, name: str) -> None:
    """Beside these everything else is ignored."""
    same = {name, "type"} if name in ("anyOf", "oneOf") else {name}
    beside = sorted(_ASSERTIONS & set(part) - same)
    if name == "allOf" and len(part[name]) > 1:
        raise RequestError(f"{place[:200]}: allOf of several schemas cannot be held to; merge them")
    if beside:
        raise RequestError(f"{place[:200]}: {beside[0]} beside {name} cannot be held to; put it inside")


def _target(schema: Any, ref: Any, place: str) -> Any:
    """What a reference within the schema means."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise RequestError(f"{place[:200]}: $ref must be '#' or begin with '#/', not {ref!r:.100}")
    found = schema
    for name in ref.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise RequestError(f"{place[:200]}: $ref {ref[:100]!r} is nowhere in the schema")
    return found


def _ending(refs: dict[str, Any], rounds: int) -> set[str]:
    """References that something finite matches. One that takes more rounds to find out counts as such."""
    ending: set[str] = set()
    for _ in range(rounds):
        more = {ref for ref, part in refs.items() if ref not in ending and _ends(part, ending)}
        if not more:
            return ending
        ending |= more
    return set(refs)


def _ends(part: Any, ending: set[str]) -> bool:
    """Whether something finite matches, if these references end."""
    if not isinstance(part, dict) or "enum" in part or "const" in part:
        return True
    if "$ref" in part:
        return unquote(part["$ref"]) in ending
    for name in ("anyOf", "oneOf"):
        if name in part:
            return any(_ends(each, ending) for each in part[name])
    must = list(part.get("allOf", ()))
    known = part.get("properties", {})
    if part.get("type", "object") == "object":
        must += [known[name] for name in dict.fromkeys(part.get("required", ())) if name in known]
    if part.get("type") == "array" and part.get("minItems", 0) > 0:
        must.append(part.get("items"))
    return all(_ends(each, ending) for each in must)
