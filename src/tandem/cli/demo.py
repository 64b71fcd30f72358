"""`kt demo`: builds the demo model once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path | None, typer.Option(help="Directory to build it in; default: the cache.")] = None,
) -> None:
    """Build the demo model: a real Mixture of Experts of 414 M parameters (829 MB), in under a minute.

    `kt serve demo` does this by itself. Example: kt demo
    """
    from tandem.checkpoint import demo_dir

    typer.echo(prepare_demo(out or demo_dir()))


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
