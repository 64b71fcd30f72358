"""`shown_steps`: how far long work is. A terminal has a bar; a log has a line now and then: it must not be silent for
hours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

FIRST_SECONDS = 5.0
PART_OF_TIME = 0.1  # lines come this part of the time so far apart: an hour has some thirty

Report = Callable[[str, int, int], None]  # what is being done, how much of it, of how much
Counted = Callable[[int, int], str]


def pieces(done: int, total: int) -> str:
    return f"{done} of {total}"


def gigabytes(done: int, total: int) -> str:
    return f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"


@contextmanager
def shown_steps(
    first: str, *columns: ProgressColumn, counted: Counted = pieces, begin: str = ""
) -> Iterator[Report]:
    """On stderr. first: what is done before the first report. begin: what a log's lines begin with."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(begin, counted)
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True
    ) as bar:
        task = bar.add_task(first, total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report


class Lines:
    """Nothing for short work."""

    def __init__(self, begin: str, counted: Counted) -> None:
        self._begin, self._counted = begin, counted
        self._started = monotonic()
        self._line_at = self._started + FIRST_SECONDS

    def __call__(self, what: str, done: int, total: int) -> None:
        now = monotonic()
        if now < self._line_at:
            return
        self._line_at = now + max(FIRST_SECONDS, (now - self._started) * PART_OF_TIME)
        print(f"{self._begin}{what}, {self._counted(done, total)}", file=sys.stderr, flush=True)
