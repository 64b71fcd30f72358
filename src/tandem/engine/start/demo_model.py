"""The demo model, built with a progress bar when it is first asked for."""

from __future__ import annotations

from pathlib import Path


def prepare_demo(directory: Path) -> Path:
    """The demo model in `directory`, built with a progress bar on stderr if it is not there yet."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from tandem.checkpoint.demo import build_demo

    columns, console = (
        (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()),
        Console(stderr=True),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking the demo model", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        return build_demo(directory, report)
