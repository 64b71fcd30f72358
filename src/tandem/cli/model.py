"""`kt model`: models by name: fetched, listed, removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.other_names import ModelCommands

if TYPE_CHECKING:
    from tandem.hub.names import HubName

model = typer.Typer(
    cls=ModelCommands,
    help="Models by name, in the Hugging Face hub's cache: fetch, list, remove.\n\n"
    "Example: kt model pull Qwen/Qwen3-30B-A3B",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="ORG/NAME, ORG/NAME:Q4_K_M (GGUF) or ORG/NAME@REVISION")]


@model.command()
def pull(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if it would not fit.")] = False,
) -> None:
    """Fetch a model, or its newest revision, and print where it is. Interrupted, the same command goes on.

    Example: kt model pull Qwen/Qwen3-30B-A3B
    """
    from tandem.engine.start.model_files import pull as fetch_newest
    from tandem.engine.start.planning import planned
    from tandem.flags.engine_config import EngineConfig
    from tandem.kernels.this_machine import this_machine

    config = EngineConfig.from_keywords(name)
    plan = None if force else lambda path: planned(config, this_machine(), path)
    typer.echo(fetch_newest(_hub_name(name), plan, None, force))


@model.command("list")
def list_models() -> None:
    """List the models in the cache, also those that other programs have fetched.

    Example: kt model list
    """
    from rich.console import Console
    from rich.table import Table

    from tandem.hub.snapshot import cache_root
    from tandem.hub.store import kept_models

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("GB", justify="right")
    table.add_column("")
    for entry in kept_models():
        table.add_row(entry.name, f"{entry.nbytes / 1e9:.2f}", "" if entry.whole else "weights missing")
    console = Console()
    console.print(table if table.row_count else "no models", soft_wrap=True)
    console.print(f"in {cache_root()}", style="dim", markup=False, highlight=False, soft_wrap=True)


@model.command()
def rm(name: Name) -> None:
    """Remove a model, or one quantisation of it, from the cache.

    Example: kt model rm Qwen/Qwen3-30B-A3B
    """
    from tandem.hub.store import remove

    typer.echo(f"{name}: {remove(_hub_name(name)) / 1e9:.2f} GB are free again")


@model.command()
def path(name: Name) -> None:
    """Where a model is; an error when it is not here, or not all of it.

    Example: kt model path Qwen/Qwen3-30B-A3B
    """
    from tandem.checkpoint import resolve_model

    typer.echo(resolve_model(name))


def _hub_name(text: str) -> HubName:
    from tandem.errors import ConfigError
    from tandem.hub.names import hub_name

    name = hub_name(text)
    if name is None:
        raise ConfigError(f"{text} is not a name of the hub: give ORG/NAME, as Qwen/Qwen3-30B-A3B")
    return name
