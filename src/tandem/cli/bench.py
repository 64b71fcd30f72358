"""`kt bench`: measurements, each beside what it is compared with, as a table and as JSON."""

from __future__ import annotations

import typer

from tandem.cli.bench_kernels import bench_kernels

bench = typer.Typer(
    help="Measure kernels and decoding on this machine, beside PyTorch and Transformers.\n\n"
    "Example: kt bench kernels",
    no_args_is_help=True,
)
bench.command("kernels")(bench_kernels)
