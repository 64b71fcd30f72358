"""`NextN`: guesses by the checkpoint's draft layer, in a chain: each takes the one before for what came.

The layer has rows of its own in the sequence's pages. Row p is of the token at p + 1 and of the model's hidden state at
p, which the pages keep. It depends on nothing else. So rows are made when they are first needed, in any number. When a
page has become another, they are made again: after a preemption, a prefix match, or a swap for an equal page. Only the
last row of a page depends on more than the page: two sequences that part behind it take turns.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.engine.sequence import Sequence
from tandem.engine.speculation.chains import Chains
from tandem.engine.speculation.draft import LAYER_KINDS, Draft
from tandem.engine.speculation.drawn_rows import Run
from tandem.engine.state.kv_cache import KVCache

USUAL_ROWS = 64  # of a sequence, at most, in a call whose time is like that of others


class _Known(NamedTuple):
    """Rows of a sequence that are made; in these pages, each given so many times; behind: the tokens behind the whole
    ones."""

    rows: int
    pages: npt.NDArray[np.int32]
    given: npt.NDArray[np.int64]
    behind: npt.NDArray[np.int64]


class NextN:
    """`Drafter`, and `Drawing`."""

    def __init__(self, chains: Chains, pages: KVCache, *, most_rows: int) -> None:
        """most_rows: of one pass."""
        self._chain, self._pages, self._most_rows = chains, pages, most_rows
        self._known: dict[Sequence, _Known] = {}
        self._whole = np.zeros(pages.num_pages, dtype=np.int64)  # pages with all rows: how often they were given then
        self._next = np.zeros(pages.num_pages, dtype=np.int64)  # the token behind such a page
        self.unusual = False

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        return Draft((), tuple(range(LAYER_KINDS, LAYER_KINDS + most)))

    def draw(self, wanted: Rows[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """A sequence with more rows to make up for than a pass has gets them over several steps, and no guesses. After
        a failure no row counts as made."""
        found: dict[Sequence, list[int]] = {sequence: [] for sequence, _ in wanted}
        self.unusual, left = False, list(found)
        try:
            while left:
                left = self._chains(left, dict(wanted), found)
        except Exception:
            self._known.clear()
            self._whole.fill(0)
            raise
        return [tuple(found[sequence]) for sequence, _ in wanted]

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def _chains(
        self, sequences: Rows[Sequence], widths: dict[Sequence, int], found: dict[Sequence, list[int]]
    ) -> list[Sequence]:
        """Makes the guesses of those that can go together. Returns the others."""
        ready, runs, left = self._first_runs(sequences)
        if runs:
            guesses = self._chain.chains(runs, [widths[sequence] for sequence in ready])
            self.unusual |= self._chain.unusual
            found.update(zip(ready, guesses, strict=True))
        return left

    def _first_runs(self, sequences: Rows[Sequence]) -> tuple[list[Sequence], list[Run], list[Sequence]]:
        """What has come since the last pass: who gets a guess by it, the rows, and who has to wait. One of two waits
        where they share a page and go on differently behind it: its last row cannot be both's."""
        ready, runs, left, room = list[Sequence](), list[Run](), list[Sequence](), self._most_rows
        size, together = self._pages.page_size, list[Sequence]()
        for sequence in sequences:
            first, others = self._made(sequence)
            if any(_share(sequence, each, page) for each in together for page in others):
                left.append(sequence)
                continue
            together.append(sequence)
            runs += [_one_row(sequence, (page + 1) * size - 1) for page in others]
            last = min(sequence.computed_len, first + room)
            self.unusual |= sequence.computed_len - first > USUAL_ROWS
            room -= last - first
            if last > first:
                whole = last == sequence.computed_len
                runs.append(Run(sequence, first, sequence.tokens[first + 1 : last + 1], whole))
                ready += [sequence] * whole
            self._note(sequence, last)
        return ready, runs, left

    def _made(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Its rows that are there, and the whole pages among them whose last row is of another token than its own. One
        row at least is left, so that a pass leads to a guess."""
        known = self._known.get(sequence)
        if known is None or not self._still(sequence, known):
            known = self._in_pages(sequence)
        whole = known.rows // self._pages.page_size
        others = np.flatnonzero(self._next[known.pages[:whole]] != known.behind[:whole])
        return min(known.rows, sequence.computed_len - 1), others.tolist()

    def _still(self, sequence: Sequence, known: _Known) -> bool:
        """Whether it has the pages that it had, and nobody else had them since."""
        pages = sequence.page_table[: len(known.pages)]
        same = sequence.num_pages >= len(pages) and np.array_equal(pages, known.pages)
        return same and np.array_equal(self._pages.times_given[pages], known.given)

    def _in_pages(self, sequence: Sequence) -> _Known:
        """Rows that others made of the same tokens."""
        known = self._of(sequence, sequence.computed_len)
        made = self._whole[known.pages] == known.given
        whole = len(made) if made.all() else int(made.argmin())
        return known._replace(rows=whole * self._pages.page_size)

    def _of(self, sequence: Sequence, rows: int) -> _Known:
        """The whole pages of so many rows, and the one behind them, if there is."""
        size = self._pages.page_size
        pages = sequence.page_table[: -(-rows // size)].copy()
        behind = np.array(sequence.tokens[size : rows + 1 : size], dtype=np.int64)
        return _Known(rows, pages, self._pages.times_given[pages], behind)

    def _note(self, sequence: Sequence, rows: int) -> None:
        """They are there once the pass that is being made has run."""
        known = self._known[sequence] = self._of(sequence, rows)
        whole = rows // self._pages.page_size
        self._whole[known.pages[:whole]] = known.given[:whole]
        self._next[known.pages[:whole]] = known.behind[:whole]


def _one_row(sequence: Sequence, row: int) -> Run:
    return Run(sequence, row, sequence.tokens[row + 1 : row + 2], False)


def _share(sequence: Sequence, other: Sequence, page: int) -> bool:
    """Whether both have the same page in this place."""
    return page < other.num_pages and bool(sequence.page_table[page] == other.page_table[page])
