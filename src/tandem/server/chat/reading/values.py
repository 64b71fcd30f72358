"""Values of parameters' texts: JSON text by the tool's schema, for formats that write strings without quotes."""

from __future__ import annotations

import ast
import json
from typing import Any

_ALL = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
_MAX_LITERAL = 100_000
_MAX_REFERENCES = 8


def property_choices(schema: dict[str, Any] | None, key: str) -> frozenset[str]:
    """The texts that a property may be; empty where it may be others, or anything else."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    one = properties.get(key) if isinstance(properties, dict) else None
    values = one.get("enum") if isinstance(one, dict) else None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return frozenset()
    return frozenset(values)


def property_types(schema: dict[str, Any] | None, key: str) -> frozenset[str]:
    """JSON types that a property may have; empty if the schema does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    properties = schema.get("properties")
    one = properties.get(key) if isinstance(properties, dict) else None
    if one is None:
        one = schema.get("additionalProperties")
    return _types(one, schema, _MAX_REFERENCES)


def _types(one: Any, root: dict[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(one, dict) or depth == 0:
        return frozenset()
    kind = one.get("type")
    if isinstance(kind, str):
        return frozenset((kind,)) & _ALL
    if isinstance(kind, list):
        return frozenset(k for k in kind if isinstance(k, str)) & _ALL
    if isinstance(one.get("$ref"), str):
        return _types(_referred(one["$ref"], root), root, depth - 1)
    for choices in ("anyOf", "oneOf", "allOf"):
        if isinstance(one.get(choices), list):
            return frozenset().union(*(_types(choice, root, depth - 1) for choice in one[choices]))
    values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
    return frozenset(_type_of(value) for value in values)


def _referred(path: str, root: dict[str, Any]) -> Any:
    node: Any = root
    for part in path.removeprefix("#/").split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {
        str: "string", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), "string")


def json_of(text: str, types: frozenset[str]) -> str:
    """JSON text of a value that may be a string or something else. `types` empty: nothing is known."""
    for read in (_strict, _literal):
        try:
            value, written = read(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError):
            continue
        if _allowed(value, types):
            return written
    return json.dumps(text, ensure_ascii=False)


def _strict(text: str) -> tuple[Any, str]:
    value = json.loads(text, parse_constant=_refuse)
    json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    return value, text


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _literal(text: str) -> tuple[Any, str]:
    """As Python writes lists and truth values: models do that, too."""
    if len(text) > _MAX_LITERAL or text[:1] not in "[{(TFN":
        raise ValueError
    value = ast.literal_eval(text)
    return value, json.dumps(value, ensure_ascii=False, allow_nan=False)


def _allowed(value: Any, types: frozenset[str]) -> bool:
    if not types:
        return not isinstance(value, str)
    kind = _type_of(value)
    if kind == "integer":
        return bool(types & {"integer", "number"})
    if kind == "number":
        return "number" in types or ("integer" in types and value == int(value))
    return kind in types and kind != "string"
