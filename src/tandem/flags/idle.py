"""Flags of a command that were given, and that this way of running it does not read."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tandem.errors import ConfigError


def refuse_idle(context: Any, unread: Set[str], way: str) -> None:
    """Raises ConfigError that names them, where the user gave some. context: Typer's, of the command. unread: names of
    its parameters. way: how the command is run, as `without --config`."""
    idle = given_flags(context, unread)
    if idle:
        them = ("s", "it") if len(idle) == 1 else ("", "them")
        raise ConfigError(f"{', '.join(idle)} change{them[0]} nothing {way}: leave {them[1]} out")


def given_flags(context: Any, names: Set[str]) -> list[str]:
    """Those of these parameters that were given, as they are typed; an argument by its name in capitals."""
    return [
        _spelt(each, context.params[each.name])
        for each in context.command.params
        if each.name in names and context.get_parameter_source(each.name).name == "COMMANDLINE"
    ]


def _spelt(parameter: Any, value: object) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return str(max(parameter.secondary_opts if value is False else parameter.opts, key=len))
