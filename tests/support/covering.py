"""Which rows of a full product `make test` runs: enough that each two values of different axes meet. The rest is full.

Faults of kernels come from one value (a format's decoder) or from two that meet (a tier that lacks a format's path);
`make test-all` runs all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]  # an index into each axis


def pairwise(*axes: Iterable[Any], skipped: Collection[Any] = ()) -> list[Any]:
    """Every row of the product for `parametrize`; those that no pair needs are marked `full`.

    A value that is a tuple is spread over several parameters. skipped: values that this machine cannot run; rows with
    them cover no pair.
    """
    values = [list(axis) for axis in axes]
    run = [[value for value in axis if value not in skipped] for axis in values]
    chosen = {
        tuple(axis[i] for axis, i in zip(run, row, strict=True)) for row in covering_rows([*map(len, run)])
    }
    return [_param(row, row in chosen) for row in product(*values)]


def one_of_each(*axes: Iterable[Any], mark: Any = pytest.mark.full) -> list[Any]:
    """Likewise, where nothing joins the axes: rows without the mark have each value at least once, and are as few as
    the longest axis has values."""
    values = [list(axis) for axis in axes]
    chosen = {tuple(i % len(axis) for axis in values) for i in range(max(map(len, values)))}
    rows = product(*(range(len(axis)) for axis in values))
    return [
        _param(tuple(axis[i] for axis, i in zip(values, row, strict=True)), row in chosen, mark) for row in rows
    ]


def one_of_each_type(variants: Mapping[str, tuple[str, Any]]) -> list[Any]:
    """Names of models by their type and sizes. A type's first is enough for what reads names, not sizes."""
    types = [kind for kind, _ in variants.values()]
    return [
        _param((name,), kind not in types[:i])
        for i, (name, kind) in enumerate(zip(variants, types, strict=True))
    ]


def covering_rows(lengths: Sequence[int]) -> set[Row]:
    """Few rows in which each two values of different axes meet. Deterministic."""
    size = min(2, len(lengths))
    pairs = {row: set(combinations(enumerate(row), size)) for row in product(*map(range, lengths))}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs.pop(best)
        chosen.add(best)
    return chosen


def _param(row: tuple[Any, ...], chosen: bool, mark: Any = pytest.mark.full) -> Any:
    spread = [each for value in row for each in (value if isinstance(value, tuple) else (value,))]
    return pytest.param(*spread, marks=() if chosen else mark)
