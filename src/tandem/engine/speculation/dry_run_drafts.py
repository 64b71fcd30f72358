"""`DryRunDrafts`: draft tokens that got no row, and wait for what comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tandem.engine.sequence import Sequence
from tandem.engine.speculation.draft import Draft

SHADOW_EVERY = 64  # steps that could have had drafts, and had none: at least so many between two
SHADOW_SHARE = 0.005  # of all time, for drawing them
LONGEST_REST = 4096  # steps: a drawing that compiled kernels is forgotten then
CHEAP_ROWS = 256  # that a sequence lacks: others' prompts, which may be long, are not made up for by shadows
MOST_FOLLOWED = 6  # drawings in a row that found an accepted draft token


class DryRunDrafts:
    """So it is seen that drafts have become better, at the cost of drawing a few. Where one is accepted, others follow:
    evidence is gathered while it is good."""

    def __init__(self) -> None:
        self._cast: dict[Sequence, tuple[int, Draft]] = {}  # with the length that it was drawn at
        self._without = self._followed = 0
        self._credit = self._cost = 0.0  # seconds that may be spent; that the last drawing took
        self._follows = False
        self._compared = self._accepted = (
            0  # of the last drawing: sequences, and those whose first draft token was accepted
        )

    def due(self, possible: bool) -> bool:
        """Whether some should be drawn for this step, which has none."""
        self._without += possible
        if (
            not possible or self._cast
        ):  # accepted ones would be forgotten, and only rejected ones counted
            return False
        rested = self._without >= SHADOW_EVERY and self._credit >= self._cost
        return self._follows or rested or self._without >= LONGEST_REST

    @property
    def stays(self) -> int:
        """Steps for which nobody is asked: nothing becomes due, or it is put off by so many at most."""
        if self._cast or self._follows:
            return 0
        return SHADOW_EVERY - self._without - 1 if self._without < SHADOW_EVERY else SHADOW_EVERY

    @property
    def waiting(self) -> bool:
        return bool(self._cast)

    def rested(self, steps: int) -> None:
        """So many could have had draft tokens, and were not asked for."""
        self._without += steps

    def cast(self, drafts: Mapping[Sequence, Draft], seconds: float) -> None:
        """seconds: that drawing them took."""
        self._cast |= {sequence: (sequence.total_len, draft) for sequence, draft in drafts.items()}
        self._without, self._follows, self._cost = 0, False, seconds
        self._compared = self._accepted = 0
        self._credit -= seconds

    def passed(self, seconds: float) -> None:
        """A step took so long."""
        self._credit = min(self._credit + SHADOW_SHARE * seconds, 2.0 * self._cost)

    def compared(self, sequence: Sequence) -> Iterator[tuple[Draft, list[int]]]:
        """Draft tokens of the sequence, and the tokens that came, once those say all that they can."""
        if sequence not in self._cast:
            return
        length, draft = self._cast[sequence]
        tokens = sequence.tokens[length : length + len(draft.tokens)]
        if len(tokens) == len(draft.tokens) or tokens != list(draft.tokens[: len(tokens)]):
            del self._cast[sequence]
            self._compared += 1
            self._accepted += tokens[:1] == list(draft.tokens[:1])
            self._follow()
            yield draft, tokens

    def forget(self, sequence: Sequence) -> None:
        if self._cast.pop(sequence, None) is not None:
            self._follow()

    def _follow(self) -> None:
        """Once the last of a drawing has gone: whether the next one comes at once."""
        if self._cast or not self._compared:
            return
        most = 2 * self._accepted >= self._compared
        self._followed = self._followed + 1 if most else 0
        self._follows = most and self._followed < MOST_FOLLOWED
        if self._followed >= MOST_FOLLOWED:
            self._followed = 0
