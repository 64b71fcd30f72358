"""`ReasoningFormat`: how a model writes its reasoning, as data. All of them are in `reasoning.toml`."""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from tandem.errors import ConfigError
from tandem.server.chat.formats.tool_format import NONE, unknown


class ReasoningFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reasoning stands between `open` and `close`, where an answer begins; with `anywhere` also later.

    `evidence`: a chat template with one of these texts makes a model that reasons so. `assume_open`: an answer begins
    with reasoning even if the prompt does not end with `open`. `channels`: reasoning is a channel of the tool format.
    """

    name: str
    aliases: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    anywhere: bool = False
    assume_open: bool = False
    channels: bool = False

    def markers(self) -> set[str]:
        """Texts that must reach the parser even where they are special tokens."""
        return {*self.open, *self.close}

    def is_open(self, prompt: str, begun: bool = False) -> bool:
        """Whether what follows this prompt begins with reasoning. begun: a client has written it, who says so."""
        end = prompt.rstrip()
        if end.endswith(tuple(marker.rstrip() for marker in self.open)):
            return True
        return self.assume_open and not begun and not end.endswith(self.close)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: list[ReasoningFormat]


@cache
def reasoning_formats() -> tuple[ReasoningFormat, ...]:
    file = resources.files("tandem.server.chat.formats") / "reasoning.toml"
    return tuple(msgspec.toml.decode(file.read_bytes(), type=_File).format)


def reasoning_format(name: str) -> ReasoningFormat | None:
    """By its name or an alias; None for "none". Raises ConfigError with the nearest names."""
    if name.lower() == NONE:
        return None
    by_name = {known: one for one in reasoning_formats() for known in (one.name, *one.aliases)}
    if name.lower() not in by_name:
        raise ConfigError(unknown("--reasoning-parser", name, [*by_name, NONE]))
    return by_name[name.lower()]


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """The first format whose evidence is in a chat template."""
    for one in reasoning_formats():
        if any(text in template for text in one.evidence):
            return one
    return None
