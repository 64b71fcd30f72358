"""How the suite divides its files: parts are balanced, whole, and together everything."""

from __future__ import annotations

import argparse
import gc
from collections import Counter

import pytest

import scheduling

SECONDS = Counter({"a": 90.0, "b": 60.0, "c": 50.0, "d": 40.0, "e": 1.0, "f": 1.0})


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_parts_are_everything_once(count: int) -> None:
    parts = scheduling.parts_of(SECONDS, count)
    assert len(parts) == count and sorted(each for part in parts for each in part) == sorted(SECONDS)


def test_parts_take_about_as_long() -> None:
    """No two parts of these files are nearer to each other."""
    long = [sum(SECONDS[each] for each in part) for part in scheduling.parts_of(SECONDS, 2)]
    assert sorted(long) == [112.0, 130.0]


def test_servers_stay_together_and_files_that_are_not_listed_count_their_tests(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(scheduling, "DURATIONS", tmp_path / "durations.json")
    scheduling.DURATIONS.write_text('{"tests/server/test_a.py": 7, "tests/chat/test_b.py": 5}')
    tests = [f"tests/{file}.py::test[{i}]" for file in ("server/test_a", "server/test_c", "new/test_d") for i in (0, 1)]
    least = 2 * scheduling.UNLISTED_SECONDS
    assert scheduling.seconds_of(tests) == {"tests/server/": 7 + least, "tests/new/test_d.py": least}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "-1/2", "a/b", "1/2/3"])
def test_what_is_no_part_is_refused(text: str) -> None:
    assert scheduling.part("2/3") == (2, 3)
    with pytest.raises(argparse.ArgumentTypeError, match="one of N parts"):
        scheduling.part(text)


def test_files_that_did_not_run_keep_their_seconds() -> None:
    durations = scheduling.Durations()
    for file, seconds, outcome in (("a", 4.0, "passed"), ("b", 0.1, "skipped"), ("c", 0.2, "failed")):
        report = pytest.TestReport(
            f"{file}::test", (file, 1, ""), {}, outcome, None, "call", duration=seconds
        )  # fmt: skip
        durations.pytest_runtest_logreport(report)
    assert durations.merged({"a": 1, "b": 30, "c": 2, "d": 9}) == {"b": 30, "d": 9, "a": 4}


def test_the_collector_does_not_look_at_what_was_collected() -> None:
    with scheduling.collected_is_kept():
        assert not gc.isenabled()
        kept = [[]]
        kept[0].append(kept)
    assert gc.isenabled() and gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())
