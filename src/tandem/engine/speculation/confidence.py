"""`ConfidenceCalibration`: how often draft tokens that a draft calls so likely are accepted. What it says of itself
need not be so."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import accumulate
from operator import mul

from tandem.engine.speculation.draft import Draft

PARTS = 16  # of all chances: draft tokens of one part are accepted about as often as each other
_MEMORY = 0.995
_FIRST_WEIGHT = 4.0  # draft tokens that a draft's own word counts as


class ConfidenceCalibration:
    """Learnt by comparing all draft tokens, with a row or without."""

    def __init__(self) -> None:
        self._hits = [_FIRST_WEIGHT * (part + 0.5) / PARTS for part in range(PARTS)]
        self._trials = [_FIRST_WEIGHT] * PARTS

    def learn(self, draft: Draft, tokens: Rows[int]) -> None:
        """As `DraftLengths.learn`."""
        for token, draft_token, chance in zip(tokens, draft.tokens, draft.confidences, strict=False):
            part, hit = _part(chance), token == draft_token
            self._hits[part] = _MEMORY * self._hits[part] + hit
            self._trials[part] = _MEMORY * self._trials[part] + 1.0
            if not hit:
                return

    def chances(self, draft: Draft, width: int) -> list[float]:
        """Probabilities of the first `width` draft tokens: that each and all before it are accepted. 1: the draft does
        not say."""
        if not draft.confidences:
            return [1.0] * width
        parts = (_part(chance) for chance in draft.confidences[:width])
        return list(accumulate((self._hits[part] / self._trials[part] for part in parts), mul))


def _part(chance: float) -> int:
    return min(PARTS - 1, int(PARTS * max(0.0, chance)))  # NaN is 0
