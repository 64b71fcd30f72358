"""`kt convert`: a checkpoint with quantised experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tandem.convert.layout import Layout
    from tandem.quality.text import Windows

WINDOW = 512  # tokens of a calibration text that see each other


def convert(
    model: Annotated[str, typer.Argument(help="Model directory, or 'demo'.")],
    out: Annotated[Path, typer.Argument(help="New directory, or one to be finished.")],
    method: Annotated[str, typer.Option(help="INT4, INT8, MXFP4 or FP8.")] = "INT4",
    input_type: Annotated[
        str, typer.Option(help="What the experts must be stored as: auto, bf16, fp16, fp8, fp4 or int4.")
    ] = "auto",
    group: Annotated[
        int, typer.Option(help="Weights that share a scale, of INT4 and INT8: 32, 64 or 128.")
    ] = 32,
    dense: Annotated[
        bool,
        typer.Option(
            "--dense", help="Convert attention, dense and shared layers, too; not heads and routers."
        ),
    ] = False,
    no_merge_safetensor: Annotated[
        bool,
        typer.Option("--no-merge-safetensor", help="One file for each layer instead of files of one size."),
    ] = False,
    max_shard_gb: Annotated[float, typer.Option(help="Size of the files; a kill costs one at most.")] = 4.0,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text that says where errors may go (GPTQ); slower; INT4, INT8."),
    ] = None,
    calibrate_tokens: Annotated[int, typer.Option(min=2, help="How many tokens of it.")] = 16384,
    workers: Annotated[int, typer.Option(help="Threads; 0: one for each core this process may use.")] = 0,
) -> None:
    """Quantise a model's routed experts into a compressed-tensors checkpoint that other engines read, too.

    The rest is copied. Memory stays below one layer + 1 GB (--calibrate: one packed layer more). Killed at any point,
    the same command goes on.

    Example: kt convert DeepSeek-V3 DeepSeek-V3-INT4 --method INT4
    """
    from tandem.checkpoint import demo_dir, resolve_model
    from tandem.convert import Conversion
    from tandem.engine.start.demo_model import prepare_demo
    from tandem.errors import ConfigError

    directory = resolve_model(model)
    if directory == demo_dir():
        prepare_demo(directory)
    if max_shard_gb <= 0 or workers < 0:
        raise ConfigError("--max-shard-gb must be more than 0, --workers 0 or more")
    wish = Conversion(
        directory, out, method.upper(), group, input_type.lower(), dense, not no_merge_safetensor,
        int(max_shard_gb * 1e9), workers, _windows(directory, calibrate, calibrate_tokens),
    )  # fmt: skip
    layout = run_shown(wish)
    typer.echo(
        f"{out}: {len(layout.converted)} matrices as {wish.method}, {layout.output_bytes / 1e9:.2f} GB"
    )


def _windows(model: Path, text: Path | None, tokens: int) -> Windows | None:
    """The calibration text as the model reads it."""
    if text is None:
        return None
    from tandem.checkpoint import load_model_config
    from tandem.engine.text.tokenizer import Tokenizer
    from tandem.quality.text import cut, read_text

    window = min(WINDOW, load_model_config(model).max_positions)
    return cut(Tokenizer.load(model), read_text(text), window, tokens)


def run_shown(wish: object) -> Layout:
    """The conversion with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from tandem.convert import Conversion
    from tandem.convert import convert as run

    assert isinstance(wish, Conversion)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading headers", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        return run(wish, report)
