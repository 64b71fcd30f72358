"""Flags of a command that were given, and that this way of running it does not read."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tandem.errors import ConfigError


def refuse_idle(context: Any, used: Set[str], way: str) -> None:
    """Raises ConfigError that names them, where the user gave some. context: Typer's, of the command. used: names of
    the parameters that are read. way: how the command is run, as `without --config`."""
    idle = idle_flags(context, used)
    if idle:
        them = ("s", "it") if len(idle) == 1 else ("", "them")
        raise ConfigError(f"{', '.join(idle)} change{them[0]} nothing {way}: leave {them[1]} out")


def idle_flags(context: Any, used: Set[str]) -> list[str]:
    """As they are typed; an argument by its name in capitals."""
    return [
        _spelt(each, context.params[each.name])
        for each in context.command.params
        if each.name not in used and context.get_parameter_source(each.name).name == "COMMANDLINE"
    ]


def _spelt(parameter: Any, value: object) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return str(max(parameter.secondary_opts if value is False else parameter.opts, key=len))
