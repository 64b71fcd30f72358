"""Values that a schema lists, and what it says beside them: xgrammar writes any of the list, whatever stands there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_OF_NUMBERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_OF_TEXTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
}
LOOKED_AT = frozenset(("type", *_OF_NUMBERS, *_OF_TEXTS))
"""Assertions beside a list that its values are held to."""


def fits(value: Any, schema: Schema) -> bool:
    """Whether a listed value is what `LOOKED_AT` of its schema ask for."""
    if not _is_of(value, schema.get("type")):
        return False
    tests = _OF_NUMBERS if _is_number(value) else _OF_TEXTS if isinstance(value, str) else {}
    return all(test(value, schema[name]) for name, test in tests.items() if name in schema)


def _is_of(value: Any, kinds: Any) -> bool:
    names = [kinds] if isinstance(kinds, str) else kinds
    return not isinstance(names, list) or any(_KINDS[name](value) for name in names if name in _KINDS)


def common_kinds(outer: Any, inner: Any) -> list[str]:
    """Types that both allow; an integer is a number."""
    first, second = ([kinds] if isinstance(kinds, str) else list(kinds) for kinds in (outer, inner))
    both = {kind for kind in first if kind in second}
    for one, other in ((first, second), (second, first)):
        if "integer" in one and "number" in other:
            both.add("integer")
    return sorted(both)
