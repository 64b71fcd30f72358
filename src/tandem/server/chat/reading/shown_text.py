"""`ShownText`: passes text on as reasoning or as the answer, without the white space around markers."""

from __future__ import annotations

from collections.abc import Callable

from tandem.server.chat.events import ChatEvent, ReasoningDelta, TextDelta
from tandem.server.chat.reading.source import AnswerSource

_SPACE = " \t\r\n"


class ShownText:
    """Holds white space until text or a marker follows. `dropped` hears of what nobody is shown."""

    def __init__(
        self, source: AnswerSource, emit: Callable[[ChatEvent], None], dropped: Callable[[str], None]
    ) -> None:
        self._source = source
        self._emit = emit
        self._dropped = dropped
        self._held = ""
        self._after_marker = False
        self._reasoning = False

    @property
    def reasoning(self) -> bool:
        return self._reasoning

    @reasoning.setter
    def reasoning(self, begins: bool) -> None:
        self._reasoning = begins

    def say(self, text: str) -> None:
        """text: what the source has given last."""
        if self._after_marker:
            rest = text.lstrip(_SPACE)
            self._dropped(text[: len(text) - len(rest)])
            text = rest
        if not text:
            return
        self._after_marker = False
        text = self._held + self._source.fresh(text)
        visible = text.rstrip(_SPACE)
        self._held = text[len(visible) :]
        self._pass_on(visible)

    def _pass_on(self, text: str) -> None:
        if text:
            self._emit(ReasoningDelta(text) if self._reasoning else TextDelta(text))

    def marker(self, text: str) -> None:
        """Drops a marker of the format, and white space on both sides of it."""
        self._dropped(self._held + text)
        self._held = ""
        self._after_marker = True

    def end(self) -> None:
        self._pass_on(self._held)
        self._held = ""
