"""`PricedDrafter`: draft tokens, accepted as often as wished, each at a stated price, as a draft layer's are."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from time import perf_counter

from tandem.engine.sequence import Sequence
from tandem.engine.speculation.draft import LAYER_KINDS, Draft
from tandem.engine.speculation.oracle_drafter import OracleDrafter


class PricedDrafter:
    """`Drafter`, and `BatchDrafter`. A chain for all sequences takes `seconds` times the longest."""

    unusual = False

    def __init__(
        self, answers: Mapping[tuple[str, int], Rows[int]], acceptance: float, vocab: int, seconds: float
    ) -> None:
        self._said, self._seconds = OracleDrafter(answers, acceptance, vocab), seconds

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        return Draft((), tuple(range(LAYER_KINDS, LAYER_KINDS + most)))

    def draw(self, requests: Rows[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        deadline = perf_counter() + self._seconds * max(width for _, width in requests)
        drafts = [self._said.propose(sequence, width) for sequence, width in requests]
        while perf_counter() < deadline:
            pass
        return [() if draft is None else draft.tokens for draft in drafts]

    def behind(self, sequence: Sequence) -> int:
        return 0

    def forget(self, sequence: Sequence) -> None:
        """There is nothing to forget."""
