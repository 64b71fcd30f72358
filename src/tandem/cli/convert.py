"""`kt convert`: a checkpoint with quantised experts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.flags.idle import refuse_idle

if TYPE_CHECKING:
    from tandem.convert.layout import Layout
    from tandem.quality.text import Windows

WINDOW = 512  # tokens of a calibration text that see each other


Method = Annotated[str, typer.Option(help="INT4, INT8, MXFP4 or FP8.")]
InputType = Annotated[
    str, typer.Option(help="What the experts must be stored as: auto, bf16, fp16, fp8, fp4 or int4.")
]
Group = Annotated[int, typer.Option(help="Weights that share a scale, of INT4 and INT8: 32, 64 or 128.")]
Dense = Annotated[
    bool,
    typer.Option("--dense", help="Convert attention, dense and shared layers, too; not heads and routers."),
]
PerLayer = Annotated[
    bool, typer.Option("--no-merge-safetensor", help="One file for each layer instead of files of one size.")
]
Calibrate = Annotated[
    Path | None, typer.Option(help="Text that says where errors may go (GPTQ); slower; INT4, INT8.")
]
Workers = Annotated[int, typer.Option(help="Threads; 0: one for each core this process may use.")]
# As KTransformers' converter spells them.
InputPath = Annotated[str | None, typer.Option("--input-path", "-i", hidden=True)]
Output = Annotated[Path | None, typer.Option("--output", "-o", hidden=True)]
QuantMethod = Annotated[str | None, typer.Option(hidden=True)]
CpuinferThreads = Annotated[int | None, typer.Option(hidden=True)]
ThreadpoolCount = Annotated[int, typer.Option(hidden=True)]


def convert(
    invocation: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Model directory, or 'demo'.")] = None,
    out: Annotated[Path | None, typer.Argument(help="New directory, or one to be finished.")] = None,
    method: Method = "INT4",
    input_type: InputType = "auto",
    group: Group = 32,
    dense: Dense = False,
    no_merge_safetensor: PerLayer = False,
    max_shard_gb: Annotated[float, typer.Option(help="Size of the files; a kill costs one at most.")] = 4.0,
    calibrate: Calibrate = None,
    calibrate_tokens: Annotated[int, typer.Option(min=2, help="How many tokens of it.")] = 16384,
    workers: Workers = 0,
    input_path: InputPath = None,
    output: Output = None,
    quant_method: QuantMethod = None,
    cpuinfer_threads: CpuinferThreads = None,
    threadpool_count: ThreadpoolCount = 1,
) -> None:
    """Quantise a model's routed experts into a compressed-tensors checkpoint that other engines read, too.

    The rest is copied. Memory stays below one layer + 1 GB (--calibrate: one packed layer more). Killed at any point,
    the same command goes on.

    Example: kt convert DeepSeek-V3 DeepSeek-V3-INT4 --method INT4
    """
    from tandem.convert import Conversion
    from tandem.convert.methods import usual_name
    from tandem.errors import ConfigError

    method = usual_name(quant_method or method)
    _refuse_unread(invocation, method)
    source = _one(model, input_path, "MODEL", "--input-path")
    target = Path(_one(out, output, "OUT", "--output"))
    directory, workers = _directory(source), cpuinfer_threads or workers
    if max_shard_gb <= 0 or workers < 0:
        raise ConfigError("--max-shard-gb must be more than 0, --workers 0 or more")
    for line in _notes(directory, threadpool_count):
        typer.echo(f"note: {line}", err=True)
    cores = len(os.sched_getaffinity(0))
    wish = Conversion(
        directory, target, method, group, input_type.lower(), dense,
        not no_merge_safetensor, int(max_shard_gb * 1e9), min(workers, cores),
        _windows(directory, calibrate, calibrate_tokens),
    )  # fmt: skip
    layout = run_shown(wish)
    typer.echo(
        f"{target}: {len(layout.converted)} matrices as {wish.method}, {layout.output_bytes / 1e9:.2f} GB"
    )


def _refuse_unread(invocation: typer.Context, method: str) -> None:
    """Raises ConfigError for flags that change nothing."""
    if method not in ("INT4", "INT8"):
        refuse_idle(invocation, {"group"}, f"with --method {method}")
    if invocation.params["calibrate"] is None:
        refuse_idle(invocation, {"calibrate_tokens"}, "without --calibrate")


def _one(word: object, flag: object, name: str, spelling: str) -> str:
    """A value that can be given in two ways."""
    from tandem.errors import ConfigError

    if word is not None and flag is not None and str(word) != str(flag):
        raise ConfigError(f"{name} is {word}, but {spelling} is {flag}; give one of the two")
    if word is None and flag is None:
        raise ConfigError(f"{name} is missing: kt convert MODEL OUT --method INT4")
    return str(flag if word is None else word)


def _directory(model: str) -> Path:
    from tandem.checkpoint import demo_dir, resolve_model
    from tandem.engine.start.demo_model import prepare_demo

    directory = resolve_model(model)
    if directory == demo_dir():
        prepare_demo(directory)
    return directory


def _notes(directory: Path, threadpool_count: int) -> Iterator[str]:
    """Flags that change nothing, and a model that only other engines can serve."""
    from tandem.checkpoint import load_model_config
    from tandem.errors import TandemError

    if threadpool_count != 1:
        yield "--threadpool-count changes nothing: weights are divided among NUMA nodes when they are loaded"
    try:
        load_model_config(directory)
    except TandemError as error:
        yield f"what is written cannot be served by Tandem, only by engines that know the model: {error}"


def _windows(model: Path, text: Path | None, tokens: int) -> Windows | None:
    """The calibration text as the model reads it."""
    if text is None:
        return None
    from tandem.checkpoint import load_model_config
    from tandem.quality.text import cut, read_text
    from tandem.text.tokenizer import Tokenizer

    window = min(WINDOW, load_model_config(model).max_positions)
    return cut(Tokenizer.load(model), read_text(text, "--calibrate"), window, tokens)


def run_shown(wish: object) -> Layout:
    """The conversion; stderr says how far it is."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    from tandem.convert import Conversion
    from tandem.convert import convert as run
    from tandem.engine.start.shown_steps import gigabytes, shown_steps

    assert isinstance(wish, Conversion)
    columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with shown_steps("reading headers", *columns, counted=gigabytes) as report:
        return run(wish, report)
