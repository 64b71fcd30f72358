"""A mechanism's files are found by the folder that its shape is declared in: nobody outside lists mechanisms."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from tandem.errors import KernelError


def slice_of(shape: object) -> str:
    """The package of a shape's mechanism."""
    return type(shape).__module__.rpartition(".")[0]


def has_part(shape: object, part: str) -> bool:
    """Whether the mechanism has a file or folder of that name. Nothing is imported."""
    spec = find_spec(f"{slice_of(shape)}.{part}")
    return spec is not None and spec.origin is not None  # a folder of stale caches is none


def part_of(shape: object, part: str) -> ModuleType:
    """That file of the mechanism, imported."""
    return import_module(f"{slice_of(shape)}.{part}")


def bound_by(sides: tuple[str, ...], ops: object, shape: object, weights: tuple[object, ...]) -> Any:
    """Operations of a mechanism, bound to its weights by the first of these files that it has. Raises KernelError by
    name where it has none of them."""
    for side in sides:
        if has_part(shape, side):
            return part_of(shape, side).bound(ops, shape, *weights)
    raise KernelError(f"there are no {sides[0]} kernels for {type(shape).__name__}")
