"""docs/faults.md: what the tests marked `fault` saw, and in how many seconds.

    pytest tests --full -m fault --write-faults benchmarks/results   # runs them, and writes the table anew
    python tests/support/faults/fault_table.py                       # writes it from the rows that are kept

A test that is a line of the table has `@pytest.mark.fault("what goes wrong")` and tells the fixture `fault` when it
goes wrong, when a client has its error, and when the next good answer came. Rows of a GPU are kept in a file of their
own, so that they can be brought from another machine.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from quiet_clock import QuietClock

ROOT = Path(__file__).parents[3]
TESTS, PAGE, RESULTS = ROOT / "tests", ROOT / "docs" / "faults.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- faults: tests/support/faults/fault_table.py writes this -->", "<!-- /faults -->"
FILES = {"cpu": "faults-cpu.json", "gpu": "faults-gpu.json"}
NOT_RUN = "not run"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """name: what goes wrong. where: "cpu" or "gpu". test: its id for pytest, without parameters."""

    name: str
    where: str
    test: str


class Fault:
    """One fault's clock. Seconds count from `strikes`."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.strikes()

    def strikes(self) -> None:
        self._began, self._quiet = monotonic(), QuietClock()

    def seen(self, what: str, within: float | None = None) -> None:
        """A client's view. within: most seconds to it, on a quiet machine; None where nothing is waited for."""
        self._row["sees"] = what
        if within is not None:
            self._row["error_s"] = self._seconds(within)

    def good(self, within: float) -> None:
        """A good answer has come, within so many seconds of a quiet machine."""
        self._row["good_s"] = self._seconds(within)

    def _seconds(self, most: float) -> float:
        seconds, quiet = monotonic() - self._began, self._quiet.seconds()
        assert quiet < most, f"{seconds:.1f} s, {quiet:.1f} of them with a free CPU, which may be {most} s"
        return round(seconds, 2)


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Fault:
    marker = request.node.get_closest_marker("fault")
    assert marker is not None, "only tests marked `fault` have one"
    row: Row = {"fault": marker.args[0], "where": "gpu" if request.node.get_closest_marker("gpu") else "cpu"}
    request.node.user_properties.append(("fault", row))
    return Fault(row)


class FaultRows:
    """Keeps the rows of one run, of all its processes, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get("fault")
        if isinstance(found, dict) and (report.when == "call" or report.failed):
            row = self._rows.setdefault(found["fault"], dict(found))
            row["passed"] = row.get("passed", True) and report.passed

    def pytest_sessionfinish(self) -> None:
        for where, file in FILES.items():
            new = {name: row for name, row in self._rows.items() if row["where"] == where}
            if new:
                keep(self._folder / file, new)
        if self._folder.resolve() == RESULTS:
            write_page()


def keep(file: Path, new: dict[str, Row]) -> None:
    """Rows of cases that were not run stay; those of cases that are no more go."""
    from tandem.bench.rows import machine_name, stamp
    from tandem.machine.machine import Machine

    detected = Machine.detect()
    machine = machine_name(detected.with_gpus() if file.name == FILES["gpu"] else detected)
    stamped = {name: row | {"machine": machine, "date": stamp(machine)["date"]} for name, row in new.items()}
    names = [case.name for case in cases()]
    rows = {name: row for name, row in (read(file) | stamped).items() if name in names}
    lines = ",\n".join(" " + json.dumps(rows[name], ensure_ascii=False) for name in names if name in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"[\n{lines}\n]\n")


def read(file: Path) -> dict[str, Row]:
    return {row["fault"]: row for row in json.loads(file.read_text())} if file.exists() else {}


def cases() -> list[Case]:
    """Cases of all tests, as their sources have them: nothing is imported, so a GPU's are found without one."""
    files = (file for file in sorted(TESTS.rglob("test_*.py")) if "mark.fault(" in file.read_text())
    return [case for file in files for case in _cases_of(file)]


def _cases_of(file: Path) -> Iterator[Case]:
    where = "gpu" if "mark.gpu" in file.read_text() else "cpu"
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    name = ast.literal_eval(mark.args[0])
                    yield Case(name, where, f"{file.relative_to(ROOT)}::{node.name}")


def table() -> str:
    """Both tables, from the rows that are kept."""
    rows = {where: read(RESULTS / file) for where, file in FILES.items()}
    parts = []
    for where, title in (("cpu", "Without a GPU"), ("gpu", "With a GPU")):
        if not rows[where]:
            parts.append(f"## {title}\n\nThese tests have not been run on this version: {_named(where)}.")
            continue
        lines = [_line(case, rows[where].get(case.name)) for case in cases() if case.where == where]
        head = "| fault | what a client sees | s to the error | s to a good answer |\n| --- | --- | ---: | ---: |"
        parts.append("\n".join([f"## {title}", "", head, *lines]) + _machines(rows[where]))
    return "\n\n".join(parts)


def _named(where: str) -> str:
    names = [case.name.split(" (")[0] for case in cases() if case.where == where]
    return "; ".join(name[0].lower() + name[1:] if name[1:2].islower() else name for name in names)


def _line(case: Case, row: Row | None) -> str:
    if row is None:
        return f"| {case.name} | {NOT_RUN} | | |"
    if not row["passed"]:
        return f"| {case.name} | **the test failed** | | |"
    return f"| {case.name} | {row['sees']} | {_shown(row.get('error_s'))} | {_shown(row.get('good_s'))} |"


def _shown(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f}"


def _machines(rows: dict[str, Row]) -> str:
    names = sorted({f"{row['machine']}, {row['date'][:10]}" for row in rows.values()})
    return f"\n\nMeasured on {'; '.join(names)}." if names else ""


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def write_page() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write_page()
