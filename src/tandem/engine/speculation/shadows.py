"""`Shadows`: guesses that got no row, and wait for what comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tandem.engine.sequence import Sequence
from tandem.engine.speculation.draft import Draft

SHADOW_EVERY = 64  # steps that could have had guesses, and had none


class Shadows:
    """So it is seen that guesses have become better, at the cost of drawing a few."""

    def __init__(self) -> None:
        self._cast: dict[Sequence, tuple[int, Draft]] = {}  # with the length that it was drawn at
        self._without = 0

    def due(self, possible: bool) -> bool:
        """Whether some should be drawn for this step, which has none."""
        self._without += possible
        if self._without < SHADOW_EVERY:
            return False
        self._without = 0
        return True

    def cast(self, drafts: Mapping[Sequence, Draft]) -> None:
        self._cast |= {sequence: (sequence.total_len, draft) for sequence, draft in drafts.items()}

    def compared(self, sequence: Sequence) -> Iterator[tuple[Draft, list[int]]]:
        """What was guessed, and the tokens that came, once those say all that they can."""
        if sequence not in self._cast:
            return
        length, draft = self._cast[sequence]
        came = sequence.tokens[length : length + len(draft.tokens)]
        if len(came) == len(draft.tokens) or came != list(draft.tokens[: len(came)]):
            del self._cast[sequence]
            yield draft, came

    def forget(self, sequence: Sequence) -> None:
        self._cast.pop(sequence, None)
