"""How tests are divided among processes: whole files, the longest first; all that start servers in one process.

A file's fixtures are built once, because its tests stay together. Two servers at once would fight for two cores.
`tests/durations.json` has the seconds of the longer files; `--store-durations` writes those of the files that ran.
`--part 2/3` runs the second of three parts that take about as long: for machines that are lent for some minutes.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
LEAST_SECONDS = 1.0  # shorter files are not listed
UNLISTED_SECONDS = 0.02  # of one of their tests
SERVERS = (  # what start servers, or are like them
    "tests/server/", "tests/faults/", "tests/clients/", "tests/cli/test_bench_serve.py",
    "tests/ray/test_ray_serve.py", "tests/front/test_front_process.py",
)  # fmt: skip


full = False  # for files that make their tests when they are imported


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the tests marked `full` (make test-all)")
    parser.addoption("--store-durations", action="store_true", help=f"write what files take to {DURATIONS.name}")
    parser.addoption("--late-gpu", type=float, metavar="MS", help="the GPU is so late before each step and weight")
    parser.addoption("--part", type=part, metavar="I/N", help="only the I-th of N parts that take about as long")


def part(text: str) -> tuple[int, int]:
    """(2, 3) for "2/3"."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}: one of N parts is 1/N to N/N")
    return int(match[1]), int(match[2])


def use_one_torch_thread() -> None:
    """As in the engine. Torch's threads wait by spinning: beside other processes they cost several times the work."""
    import torch  # not by the process that gives tests to others, which all wait for

    torch.set_num_threads(1)


def let_workers_sleep() -> None:
    """Likewise: workers of an engine in this process poll for 20 µs, where those of a server with cores of its own poll
    for 200. Only where tests import engines."""
    if workers := sys.modules.get("tandem.kernels.workers"):
        vars(workers)["WorkerPool"] = partial(vars(workers)["WorkerPool"], spin_us=20)


@contextmanager
def collected_is_kept() -> Iterator[None]:
    """Python's collector looks neither at tests and what they import, a million objects, nor meanwhile at what comes.
    Each look took 0.8 s: a third of collecting, and nearly all of tests whose engines look before each graph."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # after pytest's own looks, or nanobind takes what is kept for leaked


def runs_full(config: pytest.Config) -> bool:
    """Tests marked `full` run with --full, or where they are named: file::test."""
    return config.getoption("--full") or any("::" in each for each in config.args)


def leave_out_full(config: pytest.Config, items: list[pytest.Item]) -> None:
    if runs_full(config):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def check_names(items: list[pytest.Item]) -> None:
    """pytest-xdist runs one test for each id, so others of the same id would be left out without a word."""
    if same := [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]:
        raise pytest.UsageError(f"tests with the same id, of which only one would run: {', '.join(same)}")


def leave_out_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All but one part of them, if `--part` names one."""
    if config.getoption("--part") is None:
        return
    number, count = config.getoption("--part")
    kept = parts_of(seconds_of(item.nodeid for item in items), count)[number - 1]
    config.hook.pytest_deselected(items=[item for item in items if group_of(item.nodeid) not in kept])
    items[:] = [item for item in items if group_of(item.nodeid) in kept]


def parts_of(seconds: Counter[str], count: int) -> list[set[str]]:
    """Groups by part: the longest first, each to the part that has the least to do yet."""
    parts: list[set[str]] = [set() for _ in range(count)]
    for group, _ in sorted(seconds.items(), key=lambda each: (-each[1], each[0])):
        min(parts, key=lambda part: sum(seconds[each] for each in part)).add(group)
    return parts


def longest_first(items: list[pytest.Item]) -> None:
    """Orders groups of files by their seconds; tests of a file keep their order."""
    seconds = seconds_of(item.nodeid for item in items)
    items.sort(key=lambda item: -seconds[group_of(item.nodeid)])


def seconds_of(tests: Iterable[str]) -> Counter[str]:
    """Seconds of each group, as recorded: those of a file in which these tests are. Files that are not listed are
    short."""
    recorded, counts = json.loads(DURATIONS.read_text()), Counter(test.partition("::")[0] for test in tests)
    seconds: Counter[str] = Counter()
    for file, count in counts.items():
        seconds[group_of(file)] += recorded.get(file, UNLISTED_SECONDS * count)
    return seconds


def group_of(nodeid: str) -> str:
    """A group that stays in one process: a file, or all files that start servers."""
    file = nodeid.partition("::")[0]
    return SERVERS[0] if file.startswith(SERVERS) else file


class Durations:
    """Adds up what the tests of each file took, in all processes. Files of which no test ran keep what they had."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        if report.when == "call" and not report.skipped:
            self._ran.add(file)

    def pytest_sessionfinish(self) -> None:
        DURATIONS.write_text(json.dumps(self.merged(json.loads(DURATIONS.read_text())), indent=1) + "\n")

    def merged(self, recorded: dict[str, int]) -> dict[str, int]:
        """With what was recorded before, the longest first."""
        seconds = Counter(recorded | {file: round(self._seconds[file]) for file in self._ran})
        return {file: each for file, each in seconds.most_common() if each >= LEAST_SECONDS}
