"""`reasoning_format`: the one that a flag names."""

from __future__ import annotations

from tandem.errors import ConfigError
from tandem.server.chat.formats.tool_format import NONE, unknown
from tandem.text.reasoning_format import ReasoningFormat, reasoning_formats


def reasoning_format(name: str) -> ReasoningFormat | None:
    """By its name or an alias; None for "none". Raises ConfigError with the nearest names."""
    if name.lower() == NONE:
        return None
    by_name = {known: one for one in reasoning_formats() for known in (one.name, *one.aliases)}
    if name.lower() not in by_name:
        raise ConfigError(unknown("--reasoning-parser", name, [*by_name, NONE]))
    return by_name[name.lower()]
