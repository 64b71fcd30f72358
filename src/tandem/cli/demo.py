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
    from tandem.engine.start.demo_model import prepare_demo

    typer.echo(prepare_demo(out or demo_dir()))
