"""`ReasoningFormat`: how a model writes its reasoning, as data. All of them are in `reasoning.toml`."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

import msgspec

from tandem.text.prompt import Prompt, common_end


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


class BegunText(msgspec.Struct, frozen=True):
    """`thinks`: reasoning is open at the end of what was begun. `thought`: reasoning has ended in it.

    `answer`: what a grammar of the answer has to match first.
    """

    thinks: bool
    thought: bool = False
    answer: str = ""


def begun_text(prompt: Prompt, one: ReasoningFormat | None, opened: bool) -> BegunText:
    """opened: the prompt opens reasoning in front of what was begun."""
    thinks, until = (opened, 0) if one is None else _thoughts(prompt.begun, one, opened)
    if thinks or not until:
        return BegunText(thinks, answer="" if thinks else common_end(prompt.begun, prompt.content))
    return BegunText(False, True, prompt.begun[until:].lstrip())


def _thoughts(text: str, one: ReasoningFormat, opened: bool) -> tuple[bool, int]:
    """Whether reasoning is open at the text's end, and where the last before it has ended; 0: none has."""
    at = 0
    space, close = r"\s*", "|".join(map(re.escape, one.close))
    begin = "|".join(map(re.escape, one.open))
    if not (begin and close):
        return opened, 0
    first, later, end = re.compile(f"{space}(?:{begin})"), re.compile(begin), re.compile(close)
    while True:
        opening = None if opened else first.match(text, at) or (one.anywhere and later.search(text, at))
        if not (opened or opening):
            return False, at
        closed = end.search(text, opening.end() if opening else at)
        if closed is None:
            return True, at
        at, opened = closed.end(), False


class _FormatFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: list[ReasoningFormat]


@cache
def reasoning_formats() -> tuple[ReasoningFormat, ...]:
    file = resources.files("tandem.text") / "reasoning.toml"
    return tuple(msgspec.toml.decode(file.read_bytes(), type=_FormatFile).format)


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """The first format whose evidence is in a chat template."""
    for one in reasoning_formats():
        if any(text in template for text in one.evidence):
            return one
    return None
