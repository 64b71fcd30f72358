"""JSON schemas as grammars take them: `check_schema` refuses what would not be held to, `prepared` spells the rest.

A keyword that is silently ignored makes answers that the schema refuses. So it is named instead.
"""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import unquote

from tandem.engine.grammar.names import check_names
from tandem.engine.grammar.patterns import FORMATS, counted_groups
from tandem.engine.grammar.references import MAPS, MOST_PLACE, UNIONS, ending_of, ends, reached, target
from tandem.engine.grammar.values import LOOKED_AT, common_kinds, fits
from tandem.errors import RequestError

MOST_DEPTH = 96
MOST_PARTS = 10_000  # schemas in a schema: checking holds up other requests
# Compiling a text of at most n characters takes xgrammar 0.9 us * n^2, with 150,000 tokens. So much, all texts of a
# schema together, is many times what any machine has the time for: such a schema is refused without trying.
MOST_COUNTED = 10_000  # root of the sum of the squares

Schema = dict[str, Any]

# They assert something that no grammar of xgrammar's checks. What it warns of itself is not here.
_IGNORED = (
    "uniqueItems", "contains", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef", "contentSchema",
)  # fmt: skip
_ASSERTIONS = {
    "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength",
    "minLength", "pattern", "format", "items", "prefixItems", "maxItems", "minItems", "properties", "patternProperties",
    "additionalProperties", "propertyNames", "required", "maxProperties", "minProperties", "$ref", *UNIONS,
}  # fmt: skip
_OF_KIND = {
    "string": {"maxLength", "minLength", "pattern", "format"},
    "number": {"multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"},
    "array": {"items", "prefixItems", "maxItems", "minItems", "additionalItems"},
    "object": {
        "properties", "patternProperties", "additionalProperties", "propertyNames", "required", "maxProperties",
        "minProperties",
    },
}  # fmt: skip
_WRONG_TYPE = (TypeError, ValueError, AttributeError, RecursionError)
_ROUNDS, _VISITS = 64, 50_000  # of looking for what ends; visits: parts times rounds


def check_schema(schema: Any) -> None:
    """Raises RequestError, without a field, that names the place."""
    try:
        _check(schema)
    except RequestError:
        raise
    except _WRONG_TYPE as error:
        raise RequestError(f"a keyword of the JSON schema has a value of the wrong type ({error})") from error


def _check(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise RequestError("a JSON schema is an object")
    refs: dict[str, Any] = {}
    count, counted = 0, 0.0
    for place, part, depth in reached(schema):
        count += 1
        if count > MOST_PARTS:
            raise RequestError(f"the schema has more than {MOST_PARTS} parts")
        if depth > MOST_DEPTH:
            raise RequestError(f"{place[:MOST_PLACE]}: the schema is nested more than {MOST_DEPTH} deep")
        if isinstance(part, dict):
            _check_typed_part(place, part)
            counted = math.hypot(counted, _counted(part))
            if counted > MOST_COUNTED:
                where = f"{place[:MOST_PLACE]}: maxLength or minLength"
                raise RequestError(f"{where}: texts with such lengths take too long to compile; leave large ones out")
            if "$ref" in part:
                refs[unquote(part["$ref"])] = target(schema, part["$ref"], place)
    if not ends(schema, ending_of(refs, max(2, min(_ROUNDS, _VISITS // count)))):
        raise RequestError("no answer of finite length matches the schema: it requires itself")


def _check_typed_part(place: str, part: Schema) -> None:
    try:
        _check_part(place, part)
    except RequestError:  # a ValueError
        raise
    except _WRONG_TYPE as error:
        text = f"{place[:MOST_PLACE]}: a keyword has a value of the wrong type ({error})"
        raise RequestError(text) from error


def prepared(schema: Any) -> Any:
    """The same schema in words that xgrammar reads rightly, wherever a reference leads to."""
    return _rebuilt(schema, {id(part) for _, part, _ in reached(schema) if isinstance(part, dict)})


def _rebuilt(node: Any, schemas: set[int]) -> Any:
    """schemas: which of the objects are, others are data."""
    if isinstance(node, list):
        return [_rebuilt(each, schemas) for each in node]
    if not isinstance(node, dict):
        return node
    rebuilt = {name: _rebuilt(each, schemas) for name, each in node.items()}
    return _spelt(rebuilt) if id(node) in schemas else rebuilt


def _spelt(schema: Schema) -> Schema:
    typed = _with_type(_with_fitting_values(_with_plain_reference(schema)))
    exact = _with_exact_patterns(_with_counted_text(_with_format(typed)))
    return _with_required(_with_prefix_items(_with_type_inside(exact)))


def _with_plain_reference(schema: Schema) -> Schema:
    """xgrammar takes `%20` for three characters of a name."""
    return schema | {"$ref": unquote(schema["$ref"])} if isinstance(schema.get("$ref"), str) else schema


def _with_type(schema: Schema) -> Schema:
    """Without a type xgrammar leaves out what is said of strings, say. An answer of that kind is always valid."""
    if {"type", "enum", "const", "$ref", *UNIONS} & set(schema):
        return schema
    kinds = [kind for kind, names in _OF_KIND.items() if names & set(schema)]
    return schema | {"type": kinds[0] if len(kinds) == 1 else kinds} if kinds else schema


def _with_fitting_values(schema: Schema) -> Schema:
    """Only those listed values that are what stands beside them."""
    if "enum" not in schema and "const" not in schema:
        return schema
    values = [value for value in schema.get("enum", [schema.get("const")]) if fits(value, schema)]
    if not values:
        raise RequestError("no value of an enum or const is what stands beside it")
    return {name: part for name, part in schema.items() if name not in ("const", *LOOKED_AT)} | {"enum": values}


def _with_exact_patterns(schema: Schema) -> Schema:
    copy = dict(schema)
    if isinstance(copy.get("pattern"), str):
        copy["pattern"] = counted_groups(copy["pattern"])
    if isinstance(copy.get("patternProperties"), dict):
        copy["patternProperties"] = {counted_groups(key): part for key, part in copy["patternProperties"].items()}
    return copy


def _with_format(schema: Schema) -> Schema:
    """Formats of which xgrammar allows what is none: 31 November, 20:57:60, 01.2.3.4."""
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
    return rest | {"pattern": f"^.{{{int(least or 0)},{'' if most is None else int(most)}}}$"}


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
            parts = [typed for part in schema[name] if (typed := _of_type(schema["type"], part)) is not None]
            if not parts:
                raise RequestError(f"no part of {name} has the type beside it")
            return {key: value for key, value in schema.items() if key != "type"} | {name: parts}
    return schema


def _of_type(kinds: Any, part: Any) -> Any:
    """The part of a union where these types are asked for beside it; None: it has none of them."""
    if not isinstance(part, dict):
        return {"type": kinds} if part is True else None
    if "enum" in part:  # as `_with_fitting_values` leaves it
        values = [value for value in part["enum"] if fits(value, {"type": kinds})]
        return part | {"enum": values} if values else None
    if "type" not in part:
        return part | {"type": kinds}
    both = common_kinds(kinds, part["type"])
    return part | {"type": both[0] if len(both) == 1 else both} if both else None


def unheld_names(part: Schema) -> list[str]:
    return [name for name in _IGNORED if name in part and part[name] is not False]


def _check_part(place: str, part: Schema) -> None:
    for name in unheld_names(part):
        raise RequestError(f"{place[:MOST_PLACE]}: {name} cannot be held to; leave it out")
    for name in MAPS:
        if not isinstance(part.get(name, {}), dict):
            raise RequestError(f"{place[:MOST_PLACE]}: {name} must be an object")
    _check_counts(place, part)
    _check_values(place, part)
    check_names(place, part)
    for name in ("$ref", *UNIONS):
        if name in part:
            _check_alone(place, part, name)


def _counted(part: Schema) -> float:
    """How many characters of a text must be counted. Beside a format that xgrammar does not know, it counts them."""
    kinds = part.get("type", "string")
    if {"pattern", "enum", "const"} & set(part) or "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        return 0.0
    return float(part.get("maxLength") or part.get("minLength") or 0)


def _check_counts(place: str, part: Schema) -> None:
    least, most = part.get("minLength", 0), part.get("maxLength", math.inf)
    for name, value in (("minLength", least), ("maxLength", most)):
        if name in part and (isinstance(value, bool) or not float(value).is_integer()):
            raise RequestError(f"{place[:MOST_PLACE]}: {name} is {value!r:.40}; write a whole number")
    if least > most:
        raise RequestError(f"{place[:MOST_PLACE]}: minLength is greater than maxLength")


def _check_values(place: str, part: Schema) -> None:
    """Refuses keywords beside lists of values, types and patterns of names that cannot be held to there."""
    listed = [name for name in ("enum", "const") if name in part]
    keywords = sorted(_ASSERTIONS & set(part) - LOOKED_AT - {"enum", "const", "format"})
    if listed and (keywords or len(listed) > 1):
        name = keywords[0] if keywords else listed[1]
        raise RequestError(f"{place[:MOST_PLACE]}: {name} beside {listed[0]} cannot be held to; leave it out")
    for union in ("anyOf", "oneOf"):
        unlike = {"$ref", *UNIONS}
        if "type" in part and any(isinstance(each, dict) and unlike & set(each) for each in part.get(union, ())):
            where = f"{place[:MOST_PLACE]}: type beside {union} of references"
            raise RequestError(f"{where} cannot be held to; put it inside")
    unlisted = [name for name in part.get("required", ()) if name not in part.get("properties", {})]
    if unlisted and part.get("patternProperties"):
        where = f"{place[:MOST_PLACE]}: required {unlisted[0]!r:.60}"
        raise RequestError(f"{where} beside patternProperties cannot be held to; list it in properties")


def _check_alone(place: str, part: Schema, name: str) -> None:
    """Beside these everything else is ignored."""
    same = {name, "type"} if name in ("anyOf", "oneOf") else {name}
    others = sorted(_ASSERTIONS & set(part) - same)
    if name == "allOf" and len(part[name]) > 1:
        raise RequestError(f"{place[:MOST_PLACE]}: allOf of several schemas cannot be held to; merge them")
    if others:
        raise RequestError(f"{place[:MOST_PLACE]}: {others[0]} beside {name} cannot be held to; put it inside")
