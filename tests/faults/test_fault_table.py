"""docs/faults.md has the lines that the tests have, and all that were run are green."""

from __future__ import annotations

from collections import Counter

import fault_table
from fault_table import FILES, PAGE, RESULTS, cases, read


def test_the_page_is_what_the_tests_saw() -> None:
    assert PAGE.read_text() == fault_table.page(), "python tests/support/faults/fault_table.py writes it"


def test_every_case_was_run_and_passed() -> None:
    """Those of a GPU once one was there: until then the page says that they were not run."""
    rows = {where: read(RESULTS / file) for where, file in FILES.items()}
    known = {where: {case.name for case in cases() if case.where == where} for where in FILES}
    assert rows["cpu"].keys() == known["cpu"] and rows["gpu"].keys() <= known["gpu"]
    for row in (*rows["cpu"].values(), *rows["gpu"].values()):
        assert row["passed"] and row["sees"], row["fault"]


def test_no_two_cases_have_one_name() -> None:
    assert max(Counter(case.name for case in cases()).values()) == 1


def test_what_the_issue_of_faults_asks_for_is_there() -> None:
    """A test that is renamed keeps its line; one that goes takes this test with it."""
    names = " / ".join(case.name for case in cases())
    for wanted in (
        "kill -9", "SIGSTOP", "pool throws", "`RLIMIT_AS`", "disk is full: the log", "packed cache", "recorded",
        "HOME is read-only", "chat template", "10,000 requests", "256 clients", "SIGTERM", "again and again",
        "cannot be started again", "Two servers", "One core", "hand-off", "CUDA error", "GPU's memory",
        "tokenizer fails",
    ):  # fmt: skip
        assert wanted in names, wanted
