"""The OpenAPI document beyond the types of fields: bounds of sampling parameters, fields that may be null."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import inspect

from tandem.engine.sampling.parameters import Bounds, Dialect, names_in, ranges
from tandem.server.guard.shape import is_defaulted, parts

# Fields by the names that dialects have for them.
_ALIASES = {theirs: ours for dialect in Dialect for ours, theirs in names_in(dialect).items()} | {
    "max_completion_tokens": "max_tokens"
}
_UNLIMITED = {"ChatRequest": ("max_tokens", "max_completion_tokens")}  # -1: no limit
_ELSEWHERE = {"CompletionRequest": ("max_tokens",), "ChatRequest": ("logprobs",)}  # 0 with echo; a truth value


def document_ranges(schemas: dict[str, Any], bodies: Iterable[str]) -> None:
    """Adds the bounds to the schemas of request bodies."""
    for body in bodies:
        for name, field in schemas[body].get("properties", {}).items():
            bounds = ranges().get(_ALIASES.get(name, name))
            if bounds is not None and name not in _ELSEWHERE.get(body, ()):
                for number in _numbers(field):
                    number.update(_keywords(bounds, number))
                    if name in _UNLIMITED.get(body, ()):
                        number.update({"minimum": -1, "not": {"const": 0}})


def _numbers(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for one in schema.get("anyOf", [schema]):
        if one.get("type") in ("integer", "number"):
            yield one


def _keywords(bounds: Bounds, number: dict[str, Any]) -> dict[str, Any]:
    """JSON schema keywords of a number's limits. Narrower limits of the schema itself stay."""
    least = max(bounds.lowest, number.get("minimum", -math.inf))
    most = min(bounds.highest, number.get("maximum", math.inf))
    keywords: dict[str, Any] = {"minimum" if bounds.inclusive else "exclusiveMinimum": least}
    return keywords if most == math.inf else keywords | {"maximum": most}


def document_nulls(schemas: dict[str, Any], names: Mapping[type, str]) -> None:
    """A null is as if a field were left out (`BodyShape.without_nulls`). names: the schemas' of all structs in
    requests."""
    for struct, name in names.items():
        for field in inspect.multi_type_info([struct])[0].fields:  # type: ignore[attr-defined]
            if is_defaulted(field):
                fields = schemas[name]["properties"]
                schema = fields[field.encode_name]
                default = {"default": schema.pop("default")} if "default" in schema else {}
                fields[field.encode_name] = {"anyOf": [schema, {"type": "null"}]} | default


def structs_in(bodies: Iterable[type]) -> list[type]:
    """Types of requests, at any depth."""
    structs: dict[type, None] = {}
    waiting = list(inspect.multi_type_info(bodies))
    while waiting:
        info = waiting.pop()
        if isinstance(info, inspect.StructType):
            if info.cls not in structs:
                structs[info.cls] = None
                waiting += [field.type for field in info.fields]
        elif isinstance(info, inspect.ListType):
            waiting.append(info.item_type)
        else:
            waiting += [part for part in parts(info) if part is not info]
    return list(structs)
