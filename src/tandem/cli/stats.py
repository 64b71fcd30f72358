"""`kt stats`: which experts a recorded workload used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.flags.output_files import output_file


def stats(
    file: Annotated[
        Path, typer.Argument(help="what /dump_expert_distribution_record wrote, here or in SGLang")
    ],
    png: Annotated[
        Path | None, typer.Option(help="draw heat map and curve as PNG (needs matplotlib)", callback=output_file)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Look at recorded expert activation statistics: a heat map of layers and experts, and how uneven they are used.

    "effective" is how many evenly used experts would be as uncertain (exp of the entropy).

    Example: kt stats expert_distribution_recorder_1795274790.pt --png experts.png
    """
    from tandem.cli.stats_view import run

    run(file, png, json)
