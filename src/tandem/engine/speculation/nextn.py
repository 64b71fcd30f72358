"""`NextN`: draft tokens by the checkpoint's draft layer, in a chain: each takes the one before as accepted.

The layer has rows of its own beside the sequence's. Row p is of the token at p + 1 and of the model's hidden state at
p, which is kept. It depends on nothing else. So rows are made when they are first needed, in any number: `DraftKv`
knows which are there. Where they lie in pages, the last row of a page depends on more than the page: two sequences that
part behind it take turns.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from tandem.engine.sequence import Sequence
from tandem.engine.speculation.draft import LAYER_KINDS, Draft
from tandem.engine.speculation.draft_batch import DraftRows
from tandem.engine.speculation.draft_kv import DraftKv
from tandem.engine.speculation.rollout import Rollouts

USUAL_ROWS = 64  # of a sequence, at most, in a call whose time is like that of others


class NextN:
    """`Drafter`, and `BatchDrafter`."""

    def __init__(self, chains: Rollouts, rows: DraftKv, page_size: int, *, most_rows: int) -> None:
        """most_rows: of one pass."""
        self._chain, self._rows, self._page_size, self._most_rows = chains, rows, page_size, most_rows
        self.unusual = False
        self._confidences: dict[Sequence, tuple[float, ...]] = {}  # how likely the last draft tokens are

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        return Draft((), tuple(range(LAYER_KINDS, LAYER_KINDS + most)))

    def behind(self, sequence: Sequence) -> int:
        return sequence.computed_len - self._rows.computed_rows(sequence)[0]

    def draw(self, requests: Rows[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """A sequence with more rows to make up for than a pass has gets them over several steps, and no drafts.
        After a failure no row counts as made."""
        draft_tokens: dict[Sequence, list[int]] = {sequence: [] for sequence, _ in requests}
        self.unusual, left = False, list(draft_tokens)
        try:
            while left:
                left = self._chains(left, dict(requests), draft_tokens)
        except Exception:
            self._rows.clear()
            raise
        return [tuple(draft_tokens[sequence]) for sequence, _ in requests]

    def forget(self, sequence: Sequence) -> None:
        self._rows.forget(sequence)
        self._confidences.pop(sequence, None)

    def confidences(self, sequence: Sequence) -> tuple[float, ...]:
        return self._confidences.get(sequence, ())

    def _chains(
        self, sequences: Rows[Sequence], widths: dict[Sequence, int], drawn: dict[Sequence, list[int]]
    ) -> list[Sequence]:
        """Makes the draft tokens of those that can go together. Returns the others."""
        ready, runs, left = self._first_runs(sequences)
        if runs:
            draft_tokens = self._chain.chains(runs, [widths[sequence] for sequence in ready])
            self.unusual |= self._chain.unusual
            drawn.update(zip(ready, draft_tokens, strict=True))
            self._confidences.update(zip(ready, map(tuple, self._chain.confidences), strict=False))
        return left

    def _first_runs(self, sequences: Rows[Sequence]) -> tuple[list[Sequence], list[DraftRows], list[Sequence]]:
        """Sequences that get a draft token, runs of the rows since the last pass, and sequences that have to wait. One
        of two waits where they share a page and go on differently behind it: its last row cannot be both's."""
        ready, runs, left, room = list[Sequence](), list[DraftRows](), list[Sequence](), self._most_rows
        size, partners = self._page_size, list[Sequence]()
        for sequence in sequences:
            first, others = self._rows.computed_rows(sequence)
            if any(_share(sequence, each, page) for each in partners for page in others):
                left.append(sequence)
                continue
            partners.append(sequence)
            runs += [_one_row(sequence, (page + 1) * size - 1) for page in others]
            last = min(sequence.computed_len, first + room)
            self.unusual |= sequence.computed_len - first > USUAL_ROWS
            room -= last - first
            if last > first:
                whole = last == sequence.computed_len
                runs.append(DraftRows(sequence, first, sequence.tokens[first + 1 : last + 1], whole))
                ready += [sequence] * whole
            self._rows.note(sequence, last)
        return ready, runs, left


def _one_row(sequence: Sequence, row: int) -> DraftRows:
    return DraftRows(sequence, row, sequence.tokens[row + 1 : row + 2], False)


def _share(sequence: Sequence, other: Sequence, page: int) -> bool:
    """Whether both have the same page in this place."""
    return page < other.num_pages and bool(sequence.page_table[page] == other.page_table[page])
