"""`kt serve` and its help. The flags are EngineConfig's; this file only shows them and acts on them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tandem.errors import ConfigError, TandemError
from tandem.flags.engine_config import FLAGS, EngineConfig
from tandem.flags.env import DEMO, cache_dir
from tandem.flags.flags import Flag

if TYPE_CHECKING:
    from rich.table import Table

    from tandem.planner.plan import Plan

VALUE_WIDTH = 24  # of a choice: the reason beside it must have room on 80 columns
_EXAMPLES = """[bold]kt serve[/] MODEL [dim]\\[flags][/]   (= python -m tandem.launch_server --model MODEL)

Serve a model over HTTP: OpenAI's, Anthropic's, Ollama's and SGLang's API, and a page for browsers.
MODEL is a name of the Hugging Face hub, a directory, a GGUF file, or [cyan]demo[/].

  [dim]$[/] kt serve demo
  [dim]$[/] kt serve /models/Qwen3-30B-A3B --kt-method INT4 --port 8000
  [dim]$[/] kt serve Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M [dim](fetched first, if it fits)[/]
  [dim]$[/] kt serve --models models.toml         [dim](several, loaded on demand)[/]
"""


def serve(context: typer.Context) -> None:
    """Serve a model over HTTP: [cyan]kt serve demo[/]."""
    argv = list(context.args)
    if {"-h", "--help", "--help-all"} & set(argv) or not argv:
        return show_help(everything="--help-all" in argv)
    own_flags = {"--plan-only", "--force"} & set(argv)
    config = possible_config([word for word in argv if word not in own_flags])
    tell_at_once(f"{'planning' if '--plan-only' in own_flags else 'starting'} {config.model or config.models} …")
    if config.models is not None:
        return serve_several(config, plan_only="--plan-only" in own_flags)
    if "--plan-only" in own_flags:
        return show_plan_only(config)
    if not all_is_here(config):
        from tandem.server.launch import check_start

        check_start(config)
        prepare_in_a_child(argv)
    for notice in config.notices():
        print(f"note: {notice}", file=sys.stderr)
    from tandem.server.launch import serve as run_server

    raise typer.Exit(run_server(config))


def show_plan_only(config: EngineConfig) -> None:
    """Raises ConfigError, CheckpointError where a start would."""
    from tandem.engine.start.planning import check_tokenizer, plan_of
    from tandem.server.chat.chat_flags import check_chat_flags

    check_chat_flags(config)
    show_plan(plan_of(config))
    check_tokenizer(config)


def serve_several(config: EngineConfig, plan_only: bool) -> None:
    """A front, whose models are processes of their own."""
    if plan_only:
        raise ConfigError("--plan-only plans one MODEL: give it, and the flags of its table")
    from tandem.server.front.launch import serve_models

    raise typer.Exit(serve_models(config))


def tell_at_once(text: str) -> None:
    """On a terminal: until torch is imported nothing else is shown, for seconds on a busy machine."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def all_is_here(config: EngineConfig) -> bool:
    """Whether everything that is named is known to be here. What finds that out must not import torch: this process
    goes on to serve, and torch is 1.3 s and 200 MiB. Raises CheckpointError for a path that does not exist."""
    paths = [path for path in (config.model, config.kt_weight_path) if path is not None]
    return all(_is_here(name) for name in paths)


def _is_here(name: str) -> bool:
    from tandem.hub.demo_check import known_whole
    from tandem.hub.names import hub_name
    from tandem.hub.snapshot import find_snapshot

    if name == DEMO:
        return known_whole(cache_dir() / DEMO)
    if Path(name).expanduser().exists():
        return True
    of_hub = hub_name(name)
    if of_hub is None:  # there is no such model: this raises CheckpointError
        from tandem.checkpoint import resolve_model

        return bool(resolve_model(name))
    snapshot = find_snapshot(of_hub)
    return snapshot is not None and snapshot.model is not None


def prepare_in_a_child(argv: list[str]) -> None:
    """Builds or fetches what is not here, in a process of its own, for the same reason. Its errors are on stderr.
    Raises typer.Exit with its status where it fails, TandemError where a signal ended it."""
    from tandem.process.children import exit_reason

    command = [sys.executable, "-P", "-m", "tandem.cli.prepare", "--parent", str(os.getpid())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    try:
        child.communicate(json.dumps(argv))
    except KeyboardInterrupt:
        _end(child)
        raise
    if child.returncode < 0:
        raise TandemError(f"what prepares the model was ended by {exit_reason(child.returncode)}")
    if child.returncode:
        raise typer.Exit(child.returncode)


def _end(child: subprocess.Popen[str]) -> None:
    """It removes what it has half built. A second Ctrl+C does not wait for that."""
    try:
        child.terminate()
        child.wait()
    except KeyboardInterrupt:
        child.kill()
        child.wait()


def possible_config(argv: list[str]) -> EngineConfig:
    """Raises ConfigError with every reason: also those that only the model and the machine know."""
    config, refused = EngineConfig.possible(argv)
    if config is None:
        raise ConfigError(*refused)
    if refused:
        raise ConfigError(*refused, *_refusals(config))
    return config


def _refusals(config: EngineConfig) -> tuple[str, ...]:
    from tandem.engine.start.planning import plan_of

    try:
        plan_of(config)
    except ConfigError as error:
        return error.reasons
    except TandemError as error:
        return (str(error),)
    return ()


def show_plan(plan: Plan) -> None:
    """The plan as a table: each choice with its reason."""
    from rich.console import Console

    console = Console()
    if plan.idle:
        text = f"{plan.idle}; `kt plan` with the same flags says what would use it"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(plan_table(plan))
    for notice in plan.notices:
        console.print(f"note: {notice}", markup=False, highlight=False, soft_wrap=True)


def plan_table(plan: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Plan", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, widest in (("choice", None), ("value", VALUE_WIDTH), ("because", None)):
        table.add_column(heading, header_style="bold", no_wrap=heading == "choice", max_width=widest)
    for decision in plan.decisions:
        table.add_row(*map(Text, dataclasses.astuple(decision)))
    return table


def show_help(everything: bool) -> None:
    """The flags that most people need on one screen, or all of them by group."""
    from rich.console import Console

    console = Console()
    console.print(_EXAMPLES)
    flag_list = [f for f in FLAGS if everything or f.essential]
    for group, flags in groupby(flag_list, key=lambda f: f.group):
        console.print(f"[bold]{group}[/]")
        console.print(_flag_table(list(flags)))
    console.print("[bold]Help[/]")
    console.print("  --plan-only   Print what would be chosen, and why, and stop.")
    console.print("  --force       Fetch a model even if it would not fit.")
    if not everything:
        console.print("  --help-all    All flags, also those that do not work yet.")


def _flag_table(flags: list[Flag]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), pad_edge=False)
    table.add_column(no_wrap=True, min_width=26)
    table.add_column()
    for f in flags:
        names = ", ".join(f.spellings)
        text = f.help if _works(f) else f"{f.help} {_why_not(f)}"
        table.add_row(Text("  " + names), Text(text + _default_text(f), style="" if _works(f) else "dim"))
    return table


def _works(f: Flag) -> bool:
    """Whether some value of the flag changes something today."""
    return f.later is None and f.idle is None


def _why_not(f: Flag) -> str:
    return "Not available yet." if f.later is not None else f"It changes nothing: {f.idle}."


def _default_text(f: Flag) -> str:
    choices = f" One of {', '.join(f.choices)}." if f.choices and f.later is None else ""
    return choices + (f" [{f.default}]" if f.default not in (None, "", False) else "")
