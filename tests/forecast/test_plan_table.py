"""docs/plans.md says what `kt plan` says. After a change: python scripts/plan_table.py --write"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from repo_scripts import script_module

ROOT = Path(__file__).parents[2]
QUICK = ("qwen3-30b-a3b", "gpt-oss-120b")  # the others: make test-all


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("plan_table")


def test_the_page_has_12_models_on_six_machines(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert page.startswith(script.HEAD) and (len(script.MODELS), len(script.MACHINES)) == (12, 6)
    for what in ("of one answer", "of a prompt"):
        plans = page.partition(f"| tokens per second {what} | ")[2].partition("\n\n")[0].splitlines()[2:]
        assert [line.split(" | ")[0] for line in plans] == [f"| {name}" for name in script.MODELS]
    assert all(script.machine_line(*each) in page for each in script.MACHINES.items())


@pytest.mark.parametrize("name", QUICK)
def test_the_page_says_what_kt_plan_says(script: ModuleType, name: str) -> None:
    assert set(script.lines(name)) <= set(script.PAGE.read_text().splitlines())


def test_a_question_that_many_ask_is_answered_with_numbers(script: ModuleType) -> None:
    assert script.answer() in script.PAGE.read_text() and "GiB of RAM" in script.answer()


def test_the_page_ends_with_the_predictions_that_were_measured(script: ModuleType) -> None:
    assert script.PAGE.read_text().endswith(script.measured(script.kept_rows()))


def test_a_figure_outside_its_range_is_marked(script: ModuleType) -> None:
    decode = {"config": "m", "method": "INT4", "gpu_share": 0.5, "predicted_low": 8.0, "predicted_high": 10.0}
    rows = [decode | {"measured": 9.0}, decode | {"measured": 11.0}]
    found = script.measured(rows)
    assert "1 of 2 figures" in found and "| m | INT4 | 50% | 8–10 | 9 | 8–10 | 11 † |" in found


@pytest.mark.parametrize(
    ("name", "place"),
    [("glm-4.5-air", "laptop"), ("deepseek-v3", "workstation, 4090"), ("kimi-k2", "desktop, 5090")],
)
def test_the_ram_that_is_named_is_enough(script: ModuleType, name: str, place: str) -> None:
    """What other programs keep grows with the RAM."""
    named = re.fullmatch(r"needs (\S+ GiB)", script.cells(name, place)[0])
    assert named is not None
    wish = replace(script.MACHINES[place], ram=named[1])
    assert script.report(name, script.question(name, wish, "INT4")).fits
    little = replace(wish, ram=f"{float(named[1].split()[0]) - 1} GiB")
    assert not script.report(name, script.question(name, little, "INT4")).fits


@pytest.mark.full
def test_the_whole_page(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.page()
