"""Decoding with draft tokens, beside decoding without, in turn; answers, routing and acceptance are scripted.

    python benchmarks/scripted_drafts --config glm-4.5-air --layers 8 --format INT4 --overlap 0.33
    python benchmarks/scripted_drafts --config qwen3-30b-a3b --overlap 0.33 --fixed 3 --out benchmarks/results

Weights are made up. It runs on a GPU where there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

if __name__ == "__main__":  # this folder's, not what is inside
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripted_drafts import rows
from tandem.bench.architectures import NAMES
from tandem.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    config: Annotated[str, typer.Option(help="made-up weights of " + NAMES)],
    overlap: Annotated[float, typer.Option(min=0, max=1, help="neighbours share so many of their experts")],
    speculative: Annotated[str, typer.Option(help="NGRAM, NEXTN or DSPARK")] = "NGRAM",
    fmt: Annotated[list[str] | None, typer.Option("--format", help="of experts (default: BF16)")] = None,
    gpu_share: Annotated[list[float] | None, typer.Option(min=0, max=1, help="default: 0, 0.5, 1")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="sequences (default: 1, 8)")] = None,
    acceptance: Annotated[list[float] | None, typer.Option(min=0, max=1, help="shares of accepted drafts")] = None,
    num_steps: Annotated[
        int | None, typer.Option("--speculative-num-steps", min=1, max=64, help="most draft tokens of a step")
    ] = None,
    governor: Annotated[bool, typer.Option("--governor/--no-governor", help="as many draft tokens as pay")] = True,
    fixed: Annotated[list[int] | None, typer.Option(min=1, help="as many draft tokens in every step, as well")] = None,
    draft_ms: Annotated[float | None, typer.Option(min=0, help="time of one of NGRAM's (default: none)")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="first layers only")] = None,
    context: Annotated[int, typer.Option(min=1, help="tokens of every sequence")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="repeats; the median counts")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="worker threads")] = None,
    tier: Annotated[str, typer.Option(help="kernel tier")] = "auto",
    dense_format: Annotated[str, typer.Option(help="dense matrices: bf16, fp8, int4-g128 or mxfp4")] = "bf16",
    plot: Annotated[Path | None, typer.Option(help="draw the gain as PNG (needs matplotlib)")] = None,
    out: Annotated[Path | None, typer.Option(help="write the rows as JSON")] = None,
) -> None:
    flags = dict(locals())
    if not (governor or fixed):
        raise ConfigError("--no-governor measures nothing without widths: give --fixed 3, too")
    rows.run(rows.request(flags), out, plot)


if __name__ == "__main__":
    try:
        app()
    except ConfigError as error:
        sys.exit(str(error))
