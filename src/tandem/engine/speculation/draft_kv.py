"""`DraftKv`: which rows of a draft layer are there already, of every sequence."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tandem.engine.sequence import Sequence
from tandem.engine.state.kv_cache import KVCache


class DraftKv(Protocol):
    def computed_rows(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Its rows that are there, or that no row behind them asks for; and the whole pages among them whose last row
        is of another token than its own. One row at least is left, so that a pass leads to a draft token."""
        ...

    def note(self, sequence: Sequence, rows: int) -> None:
        """They are there once the pass that is being made has run."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...

    def clear(self) -> None:
        """No row counts as made any more."""
        ...


class DraftKvInSlots:
    """`DraftKv` of a layer that sees a window, in the sequence's slot. Every row before the window may be missing, so
    they are never many. A slot that it was given anew holds none."""

    def __init__(self, window: int) -> None:
        """window: tokens."""
        self._window = window
        self._known: dict[Sequence, tuple[int, int]] = {}  # rows, and how many slots it had had then

    def computed_rows(self, sequence: Sequence) -> tuple[int, list[int]]:
        rows, slots = self._known.get(sequence, (0, 0))
        known = rows if slots == sequence.slots_taken else 0
        return max(min(known, sequence.computed_len - 1), sequence.computed_len - self._window, 0), []

    def note(self, sequence: Sequence, rows: int) -> None:
        self._known[sequence] = rows, sequence.slots_taken

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def clear(self) -> None:
        self._known.clear()


class _DraftKvRows(NamedTuple):
    """Rows of a sequence that are made; in these pages, each given so many times; behind: the tokens behind the whole
    ones."""

    rows: int
    pages: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    behind: npt.NDArray[np.int64]


class DraftKvInPages:
    """`DraftKv` in the sequence's pages. When a page has become another, its rows are made again: after a preemption,
    a prefix match, or a swap for an equal page."""

    def __init__(self, pages: KVCache) -> None:
        self._pages = pages
        self._known: dict[Sequence, _DraftKvRows] = {}
        self._whole = np.zeros(
            pages.num_pages, dtype=np.int64
        )  # pages with all rows: how often they were given then
        self._next = np.zeros(pages.num_pages, dtype=np.int64)  # the token behind such a page

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def clear(self) -> None:
        self._known.clear()
        self._whole.fill(0)

    def computed_rows(self, sequence: Sequence) -> tuple[int, list[int]]:
        known = self._known.get(sequence)
        if known is None or not self._still(sequence, known):
            known = self._in_pages(sequence)
        whole = known.rows // self._pages.page_size
        others = np.flatnonzero(self._next[known.pages[:whole]] != known.behind[:whole])
        return min(known.rows, sequence.computed_len - 1), others.tolist()

    def _still(self, sequence: Sequence, known: _DraftKvRows) -> bool:
        """Whether it has the pages that it had, and nobody else had them since."""
        pages = sequence.page_table[: len(known.pages)]
        same = sequence.num_pages >= len(pages) and np.array_equal(pages, known.pages)
        return same and np.array_equal(self._pages.times_given[pages], known.counts)

    def _in_pages(self, sequence: Sequence) -> _DraftKvRows:
        """Rows that others made of the same tokens."""
        known = self._of(sequence, sequence.computed_len)
        equal = self._whole[known.pages] == known.counts
        whole = len(equal) if equal.all() else int(equal.argmin())
        return known._replace(rows=whole * self._pages.page_size)

    def _of(self, sequence: Sequence, rows: int) -> _DraftKvRows:
        """The whole pages of so many rows, and the one behind them, if there is."""
        size = self._pages.page_size
        pages = sequence.page_table[: -(-rows // size)].copy()
        next_tokens = np.array(sequence.tokens[size : rows + 1 : size], dtype=np.int64)
        return _DraftKvRows(rows, pages, self._pages.times_given[pages], next_tokens)

    def note(self, sequence: Sequence, rows: int) -> None:
        known = self._known[sequence] = self._of(sequence, rows)
        whole = rows // self._pages.page_size
        self._whole[known.pages[:whole]] = known.counts[:whole]
        self._next[known.pages[:whole]] = known.behind[:whole]
