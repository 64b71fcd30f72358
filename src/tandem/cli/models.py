"""`kt models`: which model types run, and how."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tandem.architectures.model_types import ModelTypeTable, Runs
    from tandem.errors import ConfigError

HOW = {
    "native": "Tandem's own code, on the CPU or beside a GPU",
    "paged": "Transformers' modules with Tandem's experts, many answers at once; on the CPU, or slower beside a GPU",
    "alone": "Transformers' modules with Tandem's experts, one answer at a time; on the CPU",
    "refused": "does not run",
}
LEAST_ALIKE = 0.7  # of difflib's ratio: what is less alike is another model
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
    answer = _of_name(table, name)
    if isinstance(answer, list):
        _show_several(answer, as_json)
        return
    row = answer
    if as_json:
        typer.echo(json.dumps(_entry(row)))
    else:
        why = f": {row.why or row.gpu}" if row.why or row.gpu else ""
        typer.echo(f"{row.model_type}: {row.how}, {_means(row)}{why}")
    raise typer.Exit(1 if row.how == "refused" else 0)


def _of_name(table: ModelTypeTable, name: str) -> Runs | list[Runs]:
    """Rows of a path, a model or a type; several where `name` is how more than one begin. Raises TandemError."""
    from tandem.architectures.model_types import rows_called, type_of_name
    from tandem.flags.env import DEMO
    from tandem.hub.names import may_be_path

    if name == DEMO or may_be_path(name):
        return _of_path(name)
    row = table.row(name.lower()) or table.row(type_of_name(name) or "")
    if row is not None:
        return row
    rows = rows_called(table, name)
    if not rows:
        raise _unknown(table, name)
    return rows if len(rows) > 1 else rows[0]


def _unknown(table: ModelTypeTable, name: str) -> ConfigError:
    from difflib import get_close_matches

    from tandem.architectures.model_types import PUBLISHED
    from tandem.errors import ConfigError

    names = [each.model_type for each in table.rows]
    names += [published for each in table.rows for published in PUBLISHED.get(each.model_type, ())]
    near = get_close_matches(name, names, 3, LEAST_ALIKE)
    hint = f"; near it: {', '.join(near)}" if near else ""
    hub = f"; kt plan {name} looks at its configuration on the hub" if "/" in name else ""
    return ConfigError(
        f"no model with experts is known by the name {name}{hint}. Tandem is for models with experts; kt models lists "
        f"them{hub}"
    )


def _of_path(name: str) -> Runs:
    """As a start would find it. Raises CheckpointError where there is no model, or a damaged one."""
    from tandem.cli.serve import tell_at_once

    tell_at_once(f"looking at {name} …")
    from tandem.architectures.model_types import Runs
    from tandem.checkpoint import load_model_config, resolve_model
    from tandem.errors import ConfigError
    from tandem.planner.gpu_plan import without_kernels
    from tandem.spec.model_config import why_alone

    path = resolve_model(name)
    try:
        config = load_model_config(path)
    except ConfigError as error:
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


def _show_all(table: ModelTypeTable, as_json: bool) -> None:
    if as_json:
        content = {"transformers": table.transformers, "types": [_entry(row) for row in table.rows]}
        typer.echo(json.dumps(content, indent=2))
        return
    _show(table.rows)
    typer.echo(f"\nTypes with experts of Transformers {table.transformers}, each run on a tiny random model.")
    for how, means in HOW.items():
        typer.echo(f"{how}: {sum(row.how == how for row in table.rows)}, {means}")


def _show_several(rows: Sequence[Runs], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_entry(row) for row in rows], indent=2))
        return
    _show(rows)
    typer.echo()
    for way in sorted({row.how for row in rows}, key=list(HOW).index):
        typer.echo(f"{way}: {HOW[way]}")


def _show(rows: Sequence[Runs]) -> None:
    """As a table, the best first."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    from tandem.architectures.model_types import PUBLISHED

    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("type", "runs", "models, or why not"):
        table.add_column(column, no_wrap=column in ("type", "runs"), overflow="fold")
    for row in sorted(rows, key=lambda row: list(HOW).index(row.how)):
        text = row.why if row.how == "refused" else ", ".join(PUBLISHED.get(row.model_type, ()))
        table.add_row(Text(row.model_type), Text(row.how, style=STYLES[row.how]), Text(text))
    Console().print(table)
