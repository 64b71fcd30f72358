"""`kt bench compare`: reports of users as one table."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tandem.cli.app import app
from tandem.errors import ConfigError


def report(model: str = "demo", decode: float = 20.0, prompt: str = "prompt of 305", **flags: Any) -> dict[str, Any]:
    """As `kt bench report` writes it (tests/cli/test_plan_command.py compares the keys), shortened."""
    predicted = {"decode": {"1": {"low": 18.0, "high": 25.0}}, "prompt": {"low": 400.0, "high": 561.2}}
    speeds = {"dram_gbps": 48.4, "pcie_gbps": 25.0, "sources": {"dram_gbps": "measured", "pcie_gbps": "assumed"}}
    return {
        "bench": "report", "format": 1, "flags": flags, "date": "2026-11-29T13:08:08+00:00", "commit": "abc",
        "machine": {"gpus": []}, "software": {"tandem": "0.2.0", "torch": "2.13.0+cpu"},
        "plan": {"model": model, "machine": "no GPU; 2 cores", "predicted": predicted, "speeds": speeds,
                 "choices": [{"name": "expert format", "value": "bf16", "reason": "nothing is rounded"}]},
        "measured": {"decoding, 1 sequence": decode, prompt: 180.0},
    }  # fmt: skip


def compared(folder: Path, *reports: Any) -> Result:
    paths = [folder / f"{letter}.json" for letter in "abcd"[: len(reports)]]
    for path, each in zip(paths, reports, strict=True):
        path.write_text(json.dumps(each))
    words = ["bench", "compare", *map(str, paths)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERM": "dumb"})


def cells(shown: Result, name: str) -> list[str]:
    (line,) = (line for line in shown.stdout.splitlines() if line.startswith(name))
    return [cell.strip() for cell in line.removeprefix(name).split("  ") if cell.strip()]


def test_reports_stand_beside_the_first(tmp_path: Path) -> None:
    shown = compared(tmp_path, report(), report(decode=31.0, kt_method="INT4"), report("other", decode=7.0))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.split()[:3] == ["a.json", "b.json", "c.json"]
    assert cells(shown, "decoding, 1 sequence, tokens/s") == ["20.0", "31.0 (1.55 ×)", "7.0"]
    assert cells(shown, "flags") == ["none", "--kt-method INT4", "none"]
    assert cells(shown, "memory read") == ["48 GB/s, measured"] * 3
    assert cells(shown, "GPU experts") == cells(shown, "bus to the GPU") == ["–"] * 3


def test_prompts_of_other_lengths_are_not_compared(tmp_path: Path) -> None:
    shown = compared(tmp_path, report(), report(prompt="prompt of 64"))
    assert cells(shown, "prompt of 305, tokens/s") == ["180.0", "–"]
    assert cells(shown, "prompt of 64, tokens/s") == ["–", "180.0"]
    assert shown.stdout.count("400.0 to 561.2") == 2 and shown.stdout.count("18.0 to 25.0") == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"bench": "decode", "rows": []}, "b.json is no report: `kt bench decode` wrote it; give files that"),
        ([1, 2], "b.json is no report: it has other JSON"),
        (report() | {"format": 2}, "b.json has format 2, and 1 is read"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: Any, says: str) -> None:
    error = compared(tmp_path, report(), content).exception
    assert isinstance(error, ConfigError) and says in str(error)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"bench": "rep')
    for name in ("a.json", "none.json"):
        error = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / name)]).exception
        assert isinstance(error, ConfigError) and f"{name} cannot be read" in str(error)


def test_a_part_that_is_missing_is_an_error_with_its_name(tmp_path: Path) -> None:
    cut = copy.deepcopy(report())
    del cut["plan"]["speeds"]
    error = compared(tmp_path, report(), cut).exception
    assert isinstance(error, ConfigError) and "b.json lacks speeds" in str(error)
