"""`AnswerSource`: text that is still coming, for readers that look ahead and go back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from tandem.server.chat.events import CallOutcome

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields: more text is needed

_SPACE = " \t\r\n"
_PIECE = 1024  # characters


class AnswerSource:
    """`text` is the next of what has come and is not taken; the rest is shown in pieces, since each character that is
    taken copies what is left of `text`. What is taken since `mark` can be put back."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0  # characters before `text`
        self._rest: deque[str] = deque()  # behind `text`
        self._end = ""
        self._begun = 0
        self._consumed: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether nothing comes behind `text`."""
        return bool(self._end) and not self._rest

    @property
    def cut(self) -> bool:
        """Whether it ended because no more was allowed."""
        return self.ended and self._end == "cut"

    def begin(self, text: str) -> None:
        """The answer's beginning, which the prompt has already: it is read, and nobody is told."""
        self._begun = len(text)
        self.add(text)

    def add(self, text: str) -> None:
        self._rest.extend(_pieces(text))
        if len(self._rest) == 1:
            self.more()

    def end(self, cut: bool) -> None:
        """No more is added."""
        self._end = "cut" if cut else "whole"

    def more(self) -> bool:
        """Shows the next piece, where there is one. A reader that waits behind much text gets as much again."""
        pieces, size = [self.text], max(_PIECE, len(self.text))
        while self._rest and size > 0:
            pieces.append(self._rest.popleft())
            size -= len(pieces[-1])
        self.text = "".join(pieces)
        return len(pieces) > 1

    def fresh(self, text: str) -> str:
        """The part that does not come from `begin`, of a text that ends at `position`."""
        known = self._begun - (self.position - len(text))
        return text[known:] if known > 0 else text

    def take(self, count: int) -> str:
        piece, self.text = self.text[:count], self.text[count:]
        self.position += len(piece)
        self._consumed.append(piece)
        return piece

    def mark(self) -> None:
        self._consumed = []

    @property
    def consumed(self) -> str:
        """Since `mark`."""
        return "".join(self._consumed)

    def put_back(self) -> None:
        """White space that it begins with is all shown at once, and what comes behind it."""
        text = self.consumed + self.text
        self.position -= len(self.consumed)
        self._consumed = []
        length = 2 * _PIECE + len(text) - len(text.lstrip(_SPACE))
        self.text = text[:length]
        self._rest.extendleft(reversed(_pieces(text[length:])))

    def broken(self) -> CallOutcome:
        """Outcome of a call that could not be read on."""
        return "cut" if self.cut and not self.text else "malformed"

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while not self.text and not self.ended:
            yield
        return self.text[:1]

    def space(self) -> Reading[None]:
        """Takes white space, as much as there is."""
        while True:
            self.take(len(self.text) - len(self.text.lstrip(_SPACE)))
            if self.text or self.ended:
                return
            yield

    def next_of(self, options: Sequence[str]) -> Reading[str]:
        """The longest of `options` that comes next, not taken; "" if none does."""
        while not self.ended and any(len(o) > len(self.text) and o.startswith(self.text) for o in options):
            yield
        return max((o for o in options if self.text.startswith(o)), key=len, default="")

    def literal(self, options: Sequence[str]) -> Reading[str]:
        """Takes the longest of `options` that comes next; "" if none does."""
        option = yield from self.next_of(options)
        self.take(len(option))
        return option

    def behind_space(self, options: Sequence[str]) -> Reading[str]:
        """The longest of `options` that comes behind white space, or at once. Nothing is taken."""
        while True:
            rest = self.text.lstrip(_SPACE)
            growing = not rest or any(len(o) > len(rest) and o.startswith(rest) for o in options)
            if self.ended or not growing:
                return max((o for o in options if rest.startswith(o)), key=len, default="")
            yield

    def take_behind_space(self, option: str) -> str:
        """Takes the option that `behind_space` has found, and the space before it."""
        return self.take(len(self.text) - len(self.text.lstrip(_SPACE)) + len(option)) if option else ""

    def half_of(self, options: Sequence[str]) -> str:
        """Beginning of one of `options`, behind white space, when no more was allowed; "": it is none."""
        rest = self.text.lstrip(_SPACE) if self.cut else ""
        return rest if rest and any(option.startswith(rest) for option in options) else ""

    def until(
        self,
        stops: Sequence[str],
        say: Callable[[str], None],
        most: int | None = None,
        say_open_end: bool = True,
    ) -> Reading[str]:
        """Gives `say` all text before the first of `stops`, which is returned and not taken. "": the text ended, or
        `most` characters came without one. `say_open_end`: also what the text ends with and may be part of a stop."""
        while True:
            at, stop = _first(self.text, stops)
            if stop and not self.ended and _may_grow(self.text[at:], stop, stops):
                stop = ""
            held = 0 if stop or (self.ended and say_open_end) else _open_end(self.text, stops)
            end = at if stop else len(self.text) - held
            if not stop:
                end = min(end, at)
            if end:
                say(self.take(end))
                most = None if most is None else most - end
            if stop or (self.ended and not self.text) or (most is not None and most < 0):
                return stop
            if self.ended:
                self.take(len(self.text))
                return ""
            yield


def _pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def _first(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """The first place where one of `stops` is, and the longest there. Without one: the text's length, ""."""
    best, marker = len(text), ""
    for stop in stops:
        at = text.find(stop)
        if 0 <= at < best or (at == best and marker and len(stop) > len(marker)):
            best, marker = at, stop
    return best, marker


def _may_grow(text: str, stop: str, stops: Sequence[str]) -> bool:
    """Whether a longer stop may turn out to be here."""
    return any(len(other) > len(text) and other.startswith(text) for other in stops if len(other) > len(stop))


def _open_end(text: str, stops: Sequence[str]) -> int:
    """How much of the text's end may be the beginning of one of `stops`."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(len(stop) > size and stop.startswith(end) for stop in stops):
            return size
    return 0
