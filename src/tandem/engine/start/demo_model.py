"""The demo model, built when it is first asked for; stderr says how far that is."""

from __future__ import annotations

from pathlib import Path


def prepare_demo(directory: Path) -> Path:
    """The demo model in `directory`, built if it is not there yet."""
    from rich.progress import TimeElapsedColumn

    from tandem.checkpoint.demo import build_demo
    from tandem.engine.start.shown_steps import shown_steps

    with shown_steps("checking the demo model", TimeElapsedColumn(), begin="demo model: ") as report:
        return build_demo(directory, report)
