"""`OracleDrafter`: draft tokens from answers that are known already, for measurements: accepted as often as wished."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from functools import lru_cache

from tandem.engine.sampling.sampler import uniform
from tandem.engine.sequence import Sequence
from tandem.engine.speculation.draft import BatchDrafter, Draft, Drafter

BLOCK = 20  # places, of which the asked share is accepted: short answers have that share, too


class OracleDrafter:
    """`Drafter`. Whether a draft token is accepted depends on its place alone, so it is the same at any width."""

    def __init__(self, answers: Mapping[tuple[str, int], Rows[int]], acceptance: float, vocab: int) -> None:
        """answers: tokens by request and index. acceptance: the share of the draft tokens that are accepted."""
        self._answers, self._acceptance, self._vocab = answers, acceptance, vocab

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        answer, first = self._answers.get((sequence.request_id, sequence.index), ()), sequence.answer_len
        places = range(first, min(first + most, len(answer)))
        tokens = tuple(self._draft_token(answer[place], place) for place in places)
        return Draft(tokens, (1,) * len(tokens)) if tokens else None

    def forget(self, sequence: Sequence) -> None:
        """There is nothing to forget."""

    def _draft_token(self, token_id: int, place: int) -> int:
        accepted = place % BLOCK in _accepted_places(place // BLOCK, self._acceptance)
        return token_id if accepted else (token_id + 1) % self._vocab


@lru_cache(4096)
def _accepted_places(block: int, acceptance: float) -> frozenset[int]:
    """Places of a block whose draft tokens are accepted, chosen at random."""
    shuffled = sorted(range(BLOCK), key=lambda i: uniform(0, 0, block * BLOCK + i, b"foretold"))
    return frozenset(shuffled[: round(acceptance * BLOCK)])


class ReplacingDrafter:
    """`Drafter`, and `BatchDrafter`: does what a draft layer does, and says what another drafter says."""

    def __init__(self, layer: Drafter, drafter: Drafter) -> None:
        assert isinstance(layer, BatchDrafter)
        self._layer, self._drawing, self._oracle = layer, layer, drafter

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        return self._layer.propose(sequence, most)

    def draw(self, requests: Rows[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        draws = self._drawing.draw(requests)
        drafts = (self._oracle.propose(sequence, width) for sequence, width in requests)
        return [() if draft is None or not own else draft.tokens for own, draft in zip(draws, drafts, strict=True)]

    def behind(self, sequence: Sequence) -> int:
        return self._drawing.behind(sequence)

    def forget(self, sequence: Sequence) -> None:
        self._layer.forget(sequence)
        self._oracle.forget(sequence)

    @property
    def unusual(self) -> bool:
        return self._drawing.unusual
