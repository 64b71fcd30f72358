"""`BodyShape`: which names a type's JSON has at every depth, to find those that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import inspect

NOTHING: tuple[Any, ...] = (None, False, "", [])  # what clients send for what they do not use


def says_nothing(value: Any) -> bool:
    """0 says something, though it equals False."""
    return any(type(value) is type(empty) and value == empty for empty in NOTHING)


@dataclass(eq=False, slots=True)
class BodyShape:
    """`fields`: of an object whose names are fixed; None: none is expected, or one with any names. `items`: of a list.
    `defaulted`: names of fields with a default that is no null. A type may refer to itself."""

    fields: dict[str, BodyShape] | None = None
    items: BodyShape | None = None
    defaulted: frozenset[str] = frozenset()

    @property
    def has_fields(self) -> bool:
        """Whether anything in it is an object with fixed names."""
        return self.fields is not None or (self.items is not None and self.items.has_fields)

    def find_unknown(self, value: Any, path: str, unknown: dict[str, Any]) -> None:
        """Adds the names that say something to `unknown`, each with its first value. `value` fits the type."""
        if isinstance(value, list) and self.items is not None:
            for item in value:
                self.items.find_unknown(item, f"{path}[]", unknown)
        elif isinstance(value, dict) and self.fields is not None:
            for name, inner in value.items():
                known = self.fields.get(name)
                if known is not None:
                    known.find_unknown(inner, f"{path}.{name}", unknown)
                elif not says_nothing(inner):
                    unknown.setdefault(f"{path}.{name}", inner)

    def without_nulls(self, value: Any) -> Any:
        """The same where a null of such a field is left out: that is what clients mean by it."""
        if isinstance(value, list) and self.items is not None:
            return [self.items.without_nulls(item) for item in value]
        if not isinstance(value, dict) or self.fields is None:
            return value
        return {
            name: self.fields[name].without_nulls(inner) if name in self.fields else inner
            for name, inner in value.items()
            if inner is not None or name not in self.defaulted
        }


def shape_of(kind: Any) -> BodyShape:
    return _shape(inspect.type_info(kind), {})


def _shape(info: inspect.Type, structs: dict[type, BodyShape]) -> BodyShape:
    shape = BodyShape()
    for part in parts(info):
        if isinstance(part, inspect.StructType):
            struct = _of_struct(part, structs)
            shape.fields, shape.defaulted = struct.fields, struct.defaulted
        elif isinstance(part, inspect.ListType):
            shape.items = _shape(part.item_type, structs)
    return shape


def _of_struct(info: inspect.StructType, structs: dict[type, BodyShape]) -> BodyShape:
    if info.cls not in structs:
        defaulted = frozenset(one.encode_name for one in info.fields if is_defaulted(one))
        structs[info.cls] = shape = BodyShape(fields={}, defaulted=defaulted)
        assert shape.fields is not None
        for one in info.fields:
            shape.fields[one.encode_name] = _shape(one.type, structs)
    return structs[info.cls]


def is_defaulted(field: inspect.Field) -> bool:
    """It may be left out, and is never null."""
    takes_null = any(isinstance(part, inspect.NoneType | inspect.AnyType) for part in parts(field.type))
    return not field.required and not takes_null


def parts(info: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(info, inspect.UnionType):
        for part in info.types:
            yield from parts(part)
    elif isinstance(info, inspect.Metadata):
        yield from parts(info.type)
    else:
        yield info

