"""`BatchArrays`: the memory of a step's `ForwardBatch`."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.sequence import Chunk, Sequence
from tandem.engine.step.batch import FIELDS, forward_batch
from tandem.models.batch import ForwardBatch


class _Numbers:
    """An array whose first numbers are a step's. A step of as many as the one before has the same tensor: making one
    takes longer than what is written into it."""

    def __init__(self, name: str, count: int, pinned: bool) -> None:
        """name: of FIELDS."""
        self._all = self._first = torch.zeros(count, dtype=FIELDS[name].dtype, pin_memory=pinned)
        self.array = self._all.numpy()

    def first(self, count: int) -> Tensor:
        if self._first.shape[0] != count:
            self._first = self._all[:count]
        return self._first


class _Places:
    """Where rows lie in pages of one kind: those of all tokens, or those of windows."""

    def __init__(self, page_size: int, max_step_tokens: int, windowed: bool, pinned: bool) -> None:
        self._page_size, self._windowed, self._pinned = page_size, windowed, pinned
        self._cache_slots = _Numbers("cache_slots", max_step_tokens, pinned)
        self._memory = torch.zeros(0, dtype=torch.int32)
        self._show(0, 0)

    def begin(self, chunks: Rows[Chunk], sequences: int) -> None:
        """Tables: [S, P] zeros, P the most pages any of these sequences has; the memory grows but is kept."""
        width = max([chunk.sequence.num_pages for chunk in chunks])
        needed = sequences * width
        if len(self._memory) < needed:
            self._memory = torch.zeros(2 * needed, dtype=torch.int32, pin_memory=self._pinned)
            self._show(sequences, width)
        elif self._tables.shape != (sequences, width):
            self._show(sequences, width)
        self._tables.fill(0)

    def _show(self, sequences: int, width: int) -> None:
        self.tables = self._memory[: sequences * width].view(sequences, width)
        self._tables = self.tables.numpy()

    def place(self, row: int, sequence: Sequence, first: int, count: int) -> None:
        """So many rows from `row` on are at positions from `first` on."""
        slots = slots_of(self._table(sequence), first, count, self._page_size)
        self._cache_slots.array[row : row + count] = slots

    def describe(self, which: slice, sequence: Sequence) -> None:
        self._tables[which, : sequence.num_pages] = self._table(sequence)[: sequence.num_pages]

    def slots(self, rows: int) -> Tensor:
        return self._cache_slots.first(rows)

    def _table(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        return sequence.window_table if self._windowed else sequence.page_table


class StepShape(NamedTuple):
    """Tokens of a page, and of the largest step."""

    page_size: int
    max_tokens: int


class BatchArrays:
    """The arrays are allocated once and refilled: a decode step costs some microseconds per sequence here."""

    def __init__(
        self,
        page_size: int,
        max_step_tokens: int,
        *,
        guessing: bool = False,
        apart: bool = False,
        windowed: bool = False,
        each_row: bool = False,
        pinned: bool = False,
    ) -> None:
        """guessing: steps may have rows of guesses. apart: each row of such a step is a sequence of its own, as rows
        that decode are: it sees the tokens before it in the same pages. So kernels and CUDA graphs for rows that decode
        compute it, with the same bits. windowed: layers that see a window have pages of their own. each_row: so it is
        in every step, prompts included; then every step takes the road of one with guesses, too. pinned: a GPU reads
        them where they are."""
        self._apart, self._guessing, self._each_row = apart, guessing, each_row
        kinds = (False, True) if windowed else (False,)
        self._places = [_Places(page_size, max_step_tokens, kind, pinned) for kind in kinds]
        self._input_ids, self._positions, self._logits_rows, self._seq_lens, self._slots, self._folded, self._sure = (
            _Numbers(name, max_step_tokens, pinned)
            for name in ("input_ids", "positions", "logits_rows", "seq_lens", "slots", "folded", "sure")
        )
        self._query_starts = _Numbers("query_starts", max_step_tokens + 1, pinned)
        self._counting = np.arange(max_step_tokens, dtype=np.int64)

    def fill(self, chunks: Rows[Chunk]) -> ForwardBatch:
        """The chunks in host memory; valid until the next `fill`."""
        apart = self._each_row or (self._apart and any(chunk.guesses for chunk in chunks))
        sequences = sum(chunk.length for chunk in chunks) if apart else len(chunks)
        folds = self._guessing and (self._each_row or not all(map(_settled, chunks)))
        for places in self._places:
            places.begin(chunks, sequences)
        s = row = logits = 0
        for chunk in chunks:
            self._place(row, chunk)
            row += chunk.length
            s += self._describe(s, chunk, row, apart, folds)
            self._logits_rows.array[logits : logits + chunk.logits] = self._counting[row - chunk.logits : row]
            logits += chunk.logits
        whole, *others = self._places
        tensors = {
            "input_ids": self._input_ids.first(row),
            "positions": self._positions.first(row),
            "cache_slots": whole.slots(row),
            "query_starts": self._query_starts.first(sequences + 1),
            "seq_lens": self._seq_lens.first(sequences),
            "block_tables": whole.tables,
            "logits_rows": self._logits_rows.first(logits),
            "slots": self._slots.first(sequences),
            "folded": self._folded.first(sequences) if folds else None,
            "sure": self._sure.first(sequences) if folds and not self._apart else None,
        }
        windows = {"cache_slots": others[0].slots(row), "block_tables": others[0].tables} if others else None
        single = sequences if apart else sum(1 for _ in takewhile(lambda c: c.length == 1, chunks))
        return forward_batch(tensors, windows, single_rows=single)

    def _describe(self, s: int, chunk: Chunk, row_end: int, apart: bool, folds: bool) -> int:
        """The chunk as sequence s, or its rows as sequences from s on; how many that are. folds: whether somebody asks
        what their slots hold."""
        sequence, count = chunk.sequence, chunk.length if apart else 1
        which, end = slice(s, s + count), sequence.computed_len + chunk.length
        for i in range(count):
            left = count - 1 - i
            self._query_starts.array[s + i + 1], self._seq_lens.array[s + i] = row_end - left, end - left
        self._slots.array[which] = sequence.slot
        if folds:
            self._folded.array[which], self._sure.array[which] = sequence.folded_len, chunk.sure
        for places in self._places:
            places.describe(which, sequence)
        return count

    def _place(self, row: int, chunk: Chunk) -> None:
        first, rows = chunk.sequence.computed_len, slice(row, row + chunk.length)
        self._input_ids.array[rows] = chunk.tokens
        self._positions.array[rows] = counted(first, chunk.length)
        for places in self._places:
            places.place(row, chunk.sequence, first, chunk.length)


def slots_of(table: npt.NDArray[np.int32], first: int, count: int, size: int) -> npt.NDArray[np.int64] | int:
    """Of so many positions from `first` on, in pages of `size`. Most rows of few lie in one page: NumPy would take
    several times as long to look up each."""
    page = first // size
    if (first + count - 1) // size == page:
        return counted(int(table[page]) * size + first % size, count)
    positions = np.arange(first, first + count)
    return table[positions // size].astype(np.int64) * size + positions % size


def counted(first: int, count: int) -> npt.NDArray[np.int64] | int:
    """From `first` on."""
    return first if count == 1 else np.arange(first, first + count)


def _settled(chunk: Chunk) -> bool:
    """It neither guesses nor follows guesses: its slot's folds hold all that is computed."""
    return not chunk.guesses and chunk.sequence.folded_len == chunk.sequence.computed_len
