"""`CommandGroup`: commands with help that fits any terminal. Those that other programs have by other names are
answered."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typer.core import TyperGroup

from tandem.errors import ConfigError
from tandem.flags.flags import repeat_text


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
        name, command, words = super().resolve_command(ctx, args)
        refuse_repeats(command, words)
        return name, command, words


def refuse_repeats(command: Any, words: Sequence[str]) -> None:
    """Raises ConfigError where an option of one value has two: click takes the last. Flags of `kt serve` are not the
    command's own, and `flags.parse` looks at them."""
    takers = [param for param in command.params if not getattr(param, "is_flag", True)]
    options = {spelling: param for param in takers for spelling in param.opts}
    values, rest = dict[str, str](), iter(words)
    for word in rest:
        if word == "--":
            return
        spelling, equals, value = word.partition("=")
        if (option := options.get(spelling)) is not None:
            value = value if equals else next(rest, "")
            first = values.setdefault(option.name, value)
            if first != value and not option.multiple:
                raise ConfigError(repeat_text(option.opts[0], first, value, secret=option.name == "api_key"))


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
