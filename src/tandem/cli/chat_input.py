"""Messages of `kt chat`, typed or pasted, of one line or several.

A message is a line, unless
* it is pasted. Its lines stay together until Enter sends them.
* It ends in a backslash. The next line belongs to it.
* It begins with three quotation marks. It goes on to a line that ends in three.
"""

from __future__ import annotations

import contextlib
import re
import select
import sys

QUOTES = '"""'
_PASTE_GAP_SECONDS = 0.05  # between a paste's lines, where the terminal does not mark pastes


class Quoted(str):
    """A message between quotation marks: no command, whatever it begins with."""


class MessageReader:
    """Reads messages from standard input, with line editing and history where Python has readline."""

    def __init__(self, prompt: str, more_prompt: str) -> None:
        """more_prompt: printed before each further line of a message."""
        self._prompt, self._more_prompt = prompt, more_prompt
        self._ended = False
        with contextlib.suppress(ImportError):
            import readline

            # Python switches it off. Without it, or with libedit, which has none, `_pasted` tells pastes.
            readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str | None:
        """The next message, None after the last. Raises KeyboardInterrupt when Ctrl+C drops what was typed."""
        text = self._lines(self._prompt)
        if text is None:
            return None
        if text.lstrip().startswith(QUOTES) and "\n" not in text:
            return self._quoted(text.strip())
        text = self._continued(text)
        return text.strip("\n").rstrip() if "\n" in text else text.strip()

    def _quoted(self, text: str) -> Quoted:
        while not (len(text) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES)):
            more = self._lines(self._more_prompt)
            if more is None:
                break
            text += "\n" + more
        return Quoted(text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n"))

    def _continued(self, text: str) -> str:
        """An even number of backslashes is text, as in shells."""
        while re.search(r"(?<!\\)(\\\\)*\\$", text):
            more = self._lines(self._more_prompt)
            text = text[:-1] + ("" if more is None else "\n" + more)
        return text

    def _lines(self, prompt: str) -> str | None:
        """A line, or those of a paste. None at the end of input, also when a line stood before it."""
        line = None if self._ended else self._line(prompt)
        while line is not None and _pasted():
            more = self._line(self._more_prompt)
            line = line if more is None else f"{line}\n{more}"
        return line

    def _line(self, prompt: str) -> str | None:
        try:
            return input(prompt)
        except EOFError:
            self._ended = True
            return None


def _pasted() -> bool:
    """Whether the terminal already has the next line: nobody types that fast. A pipe's lines are messages each."""
    return sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], _PASTE_GAP_SECONDS)[0])
