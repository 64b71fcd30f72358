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
    "paged": "Transformers' modules with Tandem's experts, many answers at once; on the CPU, or slower beside a GPU",
    "alone": "Transformers' modules with Tandem's experts, one answer at a time; on the CPU",
    "refused": "does not run",
}
STYLES = {"native": "green", "paged": "cyan", "alone": "yellow", "refused": "red"}

Name = Annotated[
    str, typer.Argument(help="A model's name, directory or GGUF file, or the model_type of its config.json")
]


def models(
    name: Name = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Does a model run, and how: by Tandem's own code, through Transformers' modules, or not.

    Example: kt models Qwen3-30B-A3B
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
        why = f": {found.why or found.gpu}" if found.why or found.gpu else ""
        typer.echo(f"{found.model_type}: {found.how}, {_means(found)}{why}")
    raise typer.Exit(1 if found.how == "refused" else 0)


def _of_type(table: Table, name: str) -> Runs:
    from difflib import get_close_matches

    from tandem.architectures.model_types import type_of_name
    from tandem.errors import ConfigError

    row = table.row(name) or table.row(type_of_name(name) or "")
    if row is not None:
        return row
    near = get_close_matches(name, [each.model_type for each in table.rows], 3, 0.5)
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise ConfigError(
        f"{name} is no directory, and no model or type with experts of that name is known{hint}; kt models lists "
        f"all; if it is a name of the hub, kt plan {name} looks at its configuration"
    )


def _of_path(path: Path) -> Runs:
    """As a start would find it."""
    from tandem.architectures.model_types import Runs
    from tandem.checkpoint import load_model_config
    from tandem.config.gpu_plan import without_kernels
    from tandem.config.model_config import why_alone
    from tandem.errors import CheckpointError, ConfigError

    try:
        config = load_model_config(path)
    except (ConfigError, CheckpointError) as error:
        return Runs(path.name, "refused", str(error))
    if config.foreign is None:
        return Runs(config.model_type, "native", gpu=without_kernels(config))
    why = why_alone(config)
    return Runs(config.model_type, "alone" if why else "paged", why)


def _means(row: Runs) -> str:
    means = HOW[row.how]
    return means.replace("on the CPU or beside a GPU", "on the CPU") if row.gpu else means


def _entry(row: Runs) -> dict[str, Any]:
    from tandem.architectures.model_types import PUBLISHED

    return row.as_json() | {"means": _means(row), "models": PUBLISHED.get(row.model_type, ())}


def _show_all(table: Table, as_json: bool) -> None:
    if as_json:
        found = {"transformers": table.transformers, "types": [_entry(row) for row in table.rows]}
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    from tandem.architectures.model_types import PUBLISHED

    made = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("type", "runs", "models, or why not"):
        made.add_column(column, no_wrap=column in ("type", "runs"))
    for row in sorted(table.rows, key=lambda row: list(HOW).index(row.how)):
        said = row.why if row.how == "refused" else ", ".join(PUBLISHED.get(row.model_type, ()))
        made.add_row(Text(row.model_type), Text(row.how, style=STYLES[row.how]), Text(said))
    console = Console()
    console.print(made)
    console.print(
        f"\nTypes with experts of Transformers {table.transformers}, each run on a tiny random model."
    )
    for how, means in HOW.items():
        count = sum(row.how == how for row in table.rows)
        console.print(f"{how}: {count}, {means}", markup=False, highlight=False, soft_wrap=True)
