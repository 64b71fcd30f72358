"""The demo model, built when it is first asked for; stderr says how far that is."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic

LINE_SECONDS = 5.0


def prepare_demo(directory: Path) -> Path:
    """The demo model in `directory`, built if it is not there yet: with a bar on a terminal, else with lines."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from tandem.checkpoint.demo import build_demo

    columns, console = (
        (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()),
        Console(stderr=True),
    )
    if not console.is_terminal:
        return build_demo(directory, DemoLines())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking the demo model", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        return build_demo(directory, report)


class DemoLines:
    """A line when a new kind of work begins, and every few seconds of it: a log must not be silent for minutes."""

    def __init__(self) -> None:
        self._kind, self._line_at = "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if what == self._kind and done < total and monotonic() < self._line_at:
            return
        self._kind, self._line_at = what, monotonic() + LINE_SECONDS
        counted = f", {done} of {total}" if done else ""
        print(f"demo model: {what}{counted}", file=sys.stderr, flush=True)
