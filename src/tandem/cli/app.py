"""The Typer app: one function per command, each in its own file, and one place where errors become text."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tandem.cli.bench import bench
from tandem.cli.chat import chat
from tandem.cli.convert import convert
from tandem.cli.demo import demo
from tandem.cli.doctor import doctor
from tandem.cli.model import model
from tandem.cli.models import models
from tandem.cli.other_names import Commands
from tandem.cli.plan import plan
from tandem.cli.quality import quality
from tandem.cli.serve import serve
from tandem.cli.stats import stats
from tandem.cli.version import version, version_asked
from tandem.errors import TandemError, exit_status

app = typer.Typer(
    name="kt",
    cls=Commands,
    help="Tandem serves Mixture-of-Experts models that are larger than the GPU.\n\n"
    "Start with: kt serve demo, then kt chat in another terminal.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=version_asked, help="The same as kt version.")
    ] = False,
) -> None:
    """Options that stand before a command."""


app.command(
    # Flags come from EngineConfig, which knows the nearest name of a misspelt one; Typer passes them on.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)(serve)
app.command()(chat)
app.command()(models)
app.command(
    # As with serve: what is not one of its own flags is one of EngineConfig's.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="MODEL [OPTIONS] [FLAGS OF kt serve]",
)(plan)
app.command()(doctor)
app.command()(convert)
app.command()(quality)
app.command()(stats)
app.command()(demo)
app.command()(version)
app.add_typer(model, name="model")
app.add_typer(bench, name="bench")


def run(argv: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0, 2 for a wrong flag or value, 130 after Ctrl-C, 1 for anything else."""
    _print_anything()
    try:
        app(args=None if argv is None else list(argv), prog_name="kt")
    except TandemError as error:
        fail(error, exit_status(error))
    except OSError as error:  # a full disk, a folder that may not be written
        fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)


def _print_anything() -> None:
    """Where the locale has no such letter, a question mark stands for it: printing never raises."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def fail(error: TandemError | str, status: int) -> None:
    """One line that names what to change, instead of a traceback."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)
