"""How tests are divided among processes: whole files, the longest first; all that start servers in one process.

A file's fixtures are built once, because its tests stay together. Two servers at once would fight for two cores.
`tests/durations.json` has the seconds of the longer files; `--store-durations` writes it anew.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

DURATIONS = Path(__file__).parents[1] / "durations.json"
LEAST_SECONDS = 1.0  # shorter files are not listed
SERVERS = (  # what start servers, or are like them
    "tests/server/", "tests/faults/", "tests/clients/", "tests/cli/test_bench_serve.py",
)  # fmt: skip


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the tests marked `full` (make test-all)")
    parser.addoption("--store-durations", action="store_true", help=f"write {DURATIONS.name} anew")


def use_one_torch_thread() -> None:
    """As in the engine. Torch's threads wait by spinning: beside other processes they cost several times the work."""
    torch.set_num_threads(1)


def leave_out_full(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `full` run with --full, or where they are named: file::test."""
    if config.getoption("--full") or any("::" in each for each in config.args):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def check_names(items: list[pytest.Item]) -> None:
    """pytest-xdist runs one test for each id, so others of the same id would be left out without a word."""
    if same := [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]:
        raise pytest.UsageError(f"tests with the same id, of which only one would run: {', '.join(same)}")


def longest_first(items: list[pytest.Item]) -> None:
    """Orders groups of files by their recorded seconds; tests of a file keep their order."""
    seconds: Counter[str] = Counter()
    for file, each in json.loads(DURATIONS.read_text()).items():
        seconds[group_of(file)] += each
    items.sort(key=lambda item: -seconds[group_of(item.nodeid)])


def group_of(nodeid: str) -> str:
    """What stays in one process: a file, or all files that start servers."""
    file = nodeid.partition("::")[0]
    return SERVERS[0] if file.startswith(SERVERS) else file


class Durations:
    """Adds up what the tests of each file took, in all processes."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest = [(file, round(s)) for file, s in self._seconds.most_common() if s >= LEAST_SECONDS]
        DURATIONS.write_text(json.dumps(dict(longest), indent=1) + "\n")
