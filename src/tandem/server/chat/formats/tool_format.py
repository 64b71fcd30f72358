"""`ToolFormat`: how a model writes tool calls, as data. The files in `tools/` are all of them.

What is read is tolerant of white space between markers. What is written (`Written`) is exact: it is what constrained
decoding makes a model say, and must be what the model was trained on.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from tandem.errors import ConfigError

CallIds = Literal["call", "short", "numbered"]

NONE = "none"  # the name that turns parsing off


class NamedJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call is one JSON object that has its name and its arguments under one of these keys."""

    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")


class NameThenJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name that ends with one of `name_end`, then an object. `name` is a regular expression with groups name, id."""

    name_end: tuple[str, ...]
    name: str = r"(?P<name>.*)"
    open: tuple[str, ...] = ()  # may stand before the object, and behind it
    close: tuple[str, ...] = ()


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name, then parameters one by one, each between markers: `open` KEY `key_end` VALUE `close`.

    `key_end` maps what ends a key to what the value is then: "string", "json" or "schema" (as the tool's schema says).
    `trim`: a line break that belongs to the markers, before and after a value.
    """

    open: str
    key_end: dict[str, Literal["string", "json", "schema"]]
    close: str
    name_end: tuple[str, ...] = ()  # the name also ends before the first parameter
    value_open: str = ""
    trim: bool = False


class Pairs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name, then `{key:value,…}` with strings between two of `quote`, which nothing escapes."""

    quote: str


class Python(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list of calls in Python's own syntax, with literals as keyword arguments."""


class Channels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything is a message: a header up to `message`, a body up to one of `end`.

    A header is `start` and a role, `channel` and its name, `recipient` and a tool's name, in any order.
    """

    start: str
    channel: str
    message: str
    constrain: str
    recipient: str
    end: tuple[str, ...]
    reasoning: tuple[str, ...]  # names of channels
    answer: tuple[str, ...]


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call exactly as the model writes it: `begin` (with {name}), arguments in `style`, `end`.

    Calls follow each other behind `separator`, all of them between `first` and `last`. `style` is "json" or one of
    those that xgrammar's structural tags know.
    """

    begin: str
    end: str
    style: str = "json"
    separator: str = "\n"
    first: str = ""
    last: str = ""
    single: bool = False  # the answer ends with its first call
    trigger: str = ""  # a text that says this calls; default: `first`, or `begin` up to the name

    def begun(self, name: str, index: int = 0, call_id: str = "") -> str:
        """`begin` of one call: {index} is its number, {id} one that is made up for it."""
        filled = self.begin.replace("{name}", name)
        return filled.replace("{index}", str(index)).replace("{id}", call_id)

    @property
    def triggered_by(self) -> str:
        return self.trigger or self.first or self.begin.partition("{name}")[0]


class ToolFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`evidence`: a chat template that contains all texts of one of these lists writes this format.

    Calls begin with one of `open` and end with one of `close`. One or several stand between `section_open` and
    `section_close`, where the format has these. `at_start`: such a text is a call only where an answer begins.
    `ids`: "call" (made here), "short" (nine letters and digits), "numbered" (functions.NAME:N, written by the model).
    """

    name: str
    aliases: tuple[str, ...] = ()
    evidence: tuple[tuple[str, ...], ...]
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    section_open: tuple[str, ...] = ()
    section_close: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()
    ids: CallIds = "call"
    named_json: NamedJson | None = None
    name_then_json: NameThenJson | None = None
    parameters: Parameters | None = None
    pairs: Pairs | None = None
    python: Python | None = None
    channels: Channels | None = None
    written: tuple[Written, ...] = ()

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers that a text is searched for."""
        return (*self.section_open, *self.open)

    def markers(self) -> set[str]:
        """Texts that must reach the parser even where they are special tokens."""
        texts = {*self.openers, *self.close, *self.section_close, *self.separator}
        if self.name_then_json:
            texts |= (
                {*self.name_then_json.name_end, "[CALL_ID]"}
                if self.ids == "short"
                else set(self.name_then_json.name_end)
            )
        if self.parameters:
            p = self.parameters
            texts |= {p.open, p.close, p.value_open, *p.key_end, *p.name_end}
        if self.pairs:
            texts.add(self.pairs.quote)
        if self.channels:
            c = self.channels
            texts |= {c.start, c.channel, c.message, c.constrain, *c.end}
        return texts - {""}


@cache
def tool_formats() -> tuple[ToolFormat, ...]:
    """All of them, in the order of their file names."""
    folder = resources.files("tandem.server.chat.formats") / "tools"
    files = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name
    )
    return tuple(msgspec.toml.decode(file.read_bytes(), type=ToolFormat) for file in files)


def tool_format(name: str) -> ToolFormat | None:
    """By its name or an alias; None for "none". Raises ConfigError with the nearest names."""
    if name.lower() == NONE:
        return None
    by_name = {known: one for one in tool_formats() for known in (one.name, *one.aliases)}
    if name.lower() not in by_name:
        raise ConfigError(unknown("--tool-call-parser", name, [*by_name, NONE]))
    return by_name[name.lower()]


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format whose evidence is in a chat template: of several, the one with the most of it."""
    best, most = None, 0
    for one in tool_formats():
        for texts in one.evidence:
            weight = sum(map(len, texts))
            if weight > most and all(text in template for text in texts):
                best, most = one, weight
    return best


def unknown(flag: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.3) or sorted(known)
    return f"{flag} {name!r} is not known; the nearest names are {', '.join(near)}"
