"""`kt models`: which model types run, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tandem.architectures.model_types import Runs, Table

HOW = {
    "native": "Tandem's own code, on the CPU or beside a GPU",
    "paged": "Transformers' modules with Tandem's experts and pages: packed batches, prefix cache; on the CPU, or "
    "beside a GPU without CUDA graphs",
    "alone": "Transformers' modules and cache with Tandem's experts: one sequence at a time; on the CPU",
    "refused": "does not run",
}
STYLES = {"native": "green", "paged": "cyan", "alone": "yellow", "refused": "red"}

Name = Annotated[
    str, typer.Argument(help="A model type, such as glm4_moe, or a model's directory or GGUF file")
]


def models(
    name: Name = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Which model types run and how: by Tandem's own code, or through Transformers' modules; and why some do not.

    Example: kt models glm4_moe
    """
    from tandem.architectures.model_types import read_table

    table = read_table()
    if not name:
        _show_all(table, as_json)
        return
    found = _of_path(Path(name)) if Path(name).exists() else _of_type(table, name)
    if as_json:
        typer.echo(json.dumps(_entry(found)))
    else:
        why = f": {found.why}" if found.why else ""
        typer.echo(f"{found.model_type}: {found.how}, {HOW[found.how]}{why}")
    raise typer.Exit(1 if found.how == "refused" else 0)


def _of_type(table: Table, name: str) -> Runs:
    from difflib import get_close_matches

    from tandem.errors import ConfigError

    row = table.row(name)
    if row is not None:
        return row
    near = get_close_matches(name, [each.model_type for each in table.rows], 3, 0.5)
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise ConfigError(
        f"there is no directory {name!r}, and no model type with experts of that name{hint}; kt models lists all"
    )


def _of_path(path: Path) -> Runs:
    """As a start would find it."""
    from tandem.architectures.model_types import Runs
    from tandem.checkpoint import load_model_config
    from tandem.config.model_config import why_alone
    from tandem.errors import ConfigError

    try:
        config = load_model_config(path)
    except ConfigError as error:
        return Runs(path.name, "refused", str(error))
    if config.foreign is None:
        return Runs(config.model_type, "native")
    why = why_alone(config)
    return Runs(config.model_type, "alone" if why else "paged", why)


def _entry(row: Runs) -> dict[str, Any]:
    return row.as_json() | {"means": HOW[row.how]}


def _show_all(table: Table, as_json: bool) -> None:
    if as_json:
        found = {"transformers": table.transformers, "types": [_entry(row) for row in table.rows]}
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("type", "runs", "why"):
        made.add_column(column, no_wrap=column != "why")
    for row in table.rows:
        made.add_row(Text(row.model_type), Text(row.how, style=STYLES[row.how]), Text(row.why))
    console = Console()
    console.print(made)
    console.print(
        f"\nTypes with experts of Transformers {table.transformers}, each run on a tiny random model."
    )
    for how, means in HOW.items():
        count = sum(row.how == how for row in table.rows)
        console.print(f"{how}: {count}, {means}", markup=False, highlight=False, soft_wrap=True)
