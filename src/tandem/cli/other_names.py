"""`CommandGroup`: commands with help that fits any terminal. Those that other programs have by other names are
answered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from typer.core import TyperGroup

from tandem.errors import ConfigError


class CommandGroup(TyperGroup):
    """Commands, and other programs' names of them."""

    instead: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for command in self.commands.values():
            command.help = flowing(command.help or "")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Types: click's, which newer Typers have within them."""
        if args and args[0] in self.instead and self.get_command(ctx, args[0]) is None:
            raise ConfigError(f"there is no {ctx.command_path} {args[0]}: give {self.instead[args[0]]}")
        return super().resolve_command(ctx, args)


def flowing(text: str) -> str:
    """Paragraphs in one line each: a docstring's own lines are longer than many terminals. Examples keep theirs."""
    return re.sub(r"(?<!\n)\n(?!\n|Example: )", " ", text)


class Commands(CommandGroup):
    """Commands of `kt`. Names: KTransformers', Ollama's."""

    instead: ClassVar[Mapping[str, str]] = {
        "run": "kt serve MODEL, then kt chat in another terminal",
        "server": "kt serve MODEL",
        "quant": "kt convert MODEL OUT",
        "microbench": "kt bench kernels",
        "pull": "kt model pull NAME",
        "list": "kt model list",
        "rm": "kt model rm NAME",
        "help": "kt --help",
    }


class ModelCommands(CommandGroup):
    """Commands of `kt model`."""

    instead: ClassVar[Mapping[str, str]] = {
        "download": "kt model pull NAME",
        "remove": "kt model rm NAME",
        "show": "kt models NAME",
    }
