"""The rows that `make test` takes of a full product, and what stays for `make test-all`."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from covering import covering_rows, one_of_each, one_of_each_type, pairwise
from kernel_cases import FORMATS, TIERS, runs
from kernel_cases import pairwise as pairwise_here


@pytest.mark.parametrize("lengths", [(3, 4), (2, 3, 4), (15, 4, 5, 2), (17, 6, 3), (1, 5, 1), (4,)])
def test_each_two_values_meet_in_few_rows(lengths: tuple[int, ...]) -> None:
    rows = covering_rows(lengths)
    for (i, a), (j, b) in combinations(enumerate(lengths), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(range(a), range(b)))
    assert all({row[i] for row in rows} == set(range(length)) for i, length in enumerate(lengths))
    longest = sorted(lengths)[-2:]
    assert len(rows) <= 1.5 * longest[0] * longest[-1]
    assert rows == covering_rows(lengths)


def is_full(row) -> bool:
    return any(mark.name == "full" for mark in row.marks)


def test_all_rows_are_there_and_what_this_machine_skips_covers_nothing() -> None:
    rows = pairwise([("a", 1), ("b", 2)], ["x", "y", "none"], [0, 1], skipped=["none"])
    assert [row.values for row in rows] == [
        (*name, tier, way) for name, tier, way in product([("a", 1), ("b", 2)], ["x", "y", "none"], [0, 1])
    ]
    kept = [row.values for row in rows if not is_full(row)]
    assert len(kept) == 4 and not [row for row in kept if "none" in row]


def test_every_format_meets_every_tier_that_runs_here() -> None:
    rows = pairwise_here(FORMATS, TIERS, ["auto", "dot_rows", "tile_mm"])
    kept = {row.values[:3] for row in rows if not is_full(row)}
    assert kept == {(*fmt, tier) for fmt in FORMATS for tier in TIERS if runs(tier)}


def test_one_of_each_takes_as_few_rows_as_have_all_values() -> None:
    rows = one_of_each("abcde", [(1, 2), ((), 4)])
    assert [row.values for row in rows] == [(letter, *pair) for letter, pair in product("abcde", [(1, 2), ((), 4)])]
    kept = [row.values for row in rows if not is_full(row)]
    assert kept == [("a", 1, 2), ("b", (), 4), ("c", 1, 2), ("d", (), 4), ("e", 1, 2)]


def test_a_type_s_first_model_stands_for_it() -> None:
    rows = one_of_each_type({"a": ("x", {}), "a-wide": ("x", {}), "b": ("y", {}), "a-tied": ("x", {})})
    assert [row.values for row in rows] == [("a",), ("a-wide",), ("b",), ("a-tied",)]
    assert [is_full(row) for row in rows] == [False, True, False, True]
