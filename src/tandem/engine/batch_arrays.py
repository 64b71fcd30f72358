"""`BatchArrays`: the memory of a step's `ForwardBatch`."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.sequence import Chunk
from tandem.models.batch import ForwardBatch


class BatchArrays:
    """The arrays are allocated once and refilled: a decode step costs some microseconds per sequence here."""

    def __init__(
        self, page_size: int, max_step_tokens: int, *, guessing: bool = False, apart: bool = False
    ) -> None:
        """guessing: steps may have rows of guesses. apart: each row of such a step is a sequence of its own, as rows
        that decode are: it sees the tokens before it in the same pages. So kernels and CUDA graphs for rows that decode
        compute it, with the same bits."""
        self._apart, self._guessing = apart, guessing
        self._page_size = page_size
        self._input_ids = np.zeros(max_step_tokens, dtype=np.int64)
        self._positions = np.zeros(max_step_tokens, dtype=np.int64)
        self._cache_slots = np.zeros(max_step_tokens, dtype=np.int64)
        self._logits_rows = np.zeros(max_step_tokens, dtype=np.int64)
        self._query_starts = np.zeros(max_step_tokens + 1, dtype=np.int32)
        self._seq_lens = np.zeros(max_step_tokens, dtype=np.int32)
        self._slots = np.zeros(max_step_tokens, dtype=np.int32)
        self._folded = np.zeros(max_step_tokens, dtype=np.int32)
        self._sure = np.zeros(max_step_tokens, dtype=np.int32)
        self._block_tables = np.zeros(0, dtype=np.int32)
        self._counting = np.arange(max_step_tokens, dtype=np.int64)

    def fill(self, chunks: Rows[Chunk]) -> ForwardBatch:
        """The chunks in host memory; valid until the next `fill`."""
        apart = self._apart and any(chunk.guesses for chunk in chunks)
        sequences = sum(chunk.length for chunk in chunks) if apart else len(chunks)
        tables = self._tables(chunks, sequences)
        s = row = logits = 0
        for chunk in chunks:
            self._place(row, chunk)
            row += chunk.length
            s += self._describe(s, chunk, row, tables, apart)
            self._logits_rows[logits : logits + chunk.logits] = self._counting[row - chunk.logits : row]
            logits += chunk.logits
        return ForwardBatch(
            input_ids=torch.from_numpy(self._input_ids[:row]),
            positions=torch.from_numpy(self._positions[:row]),
            cache_slots=torch.from_numpy(self._cache_slots[:row]),
            query_starts=torch.from_numpy(self._query_starts[: sequences + 1]),
            seq_lens=torch.from_numpy(self._seq_lens[:sequences]),
            block_tables=torch.from_numpy(tables),
            logits_rows=torch.from_numpy(self._logits_rows[:logits]),
            slots=torch.from_numpy(self._slots[:sequences]),
            folded=torch.from_numpy(self._folded[:sequences]) if self._guessing else None,
            sure=torch.from_numpy(self._sure[:sequences]) if self._guessing and not self._apart else None,
            single_rows=sequences if apart else sum(1 for _ in takewhile(lambda c: c.length == 1, chunks)),
        )

    def _describe(
        self, s: int, chunk: Chunk, row_end: int, tables: npt.NDArray[np.int32], apart: bool
    ) -> int:
        """The chunk as sequence s, or its rows as sequences from s on; how many that are."""
        sequence, count = chunk.sequence, chunk.length if apart else 1
        which, end = slice(s, s + count), sequence.computed_len + chunk.length
        for i in range(count):
            left = count - 1 - i
            self._query_starts[s + i + 1], self._seq_lens[s + i] = row_end - left, end - left
        self._slots[which] = sequence.slot
        if self._guessing:
            self._folded[which], self._sure[which] = sequence.folded_len, chunk.sure
        tables[which, : sequence.num_pages] = sequence.page_table[: sequence.num_pages]
        return count

    def _place(self, row: int, chunk: Chunk) -> None:
        sequence, first, size = chunk.sequence, chunk.sequence.computed_len, self._page_size
        end, rows = first + chunk.length, slice(row, row + chunk.length)
        self._input_ids[rows] = chunk.tokens
        if chunk.length == 1:
            self._positions[row] = first
            self._cache_slots[row] = int(sequence.page_table[first // size]) * size + first % size
            return
        positions = np.arange(first, end)
        self._positions[rows] = positions
        self._cache_slots[rows] = (
            sequence.page_table[positions // size].astype(np.int64) * size + positions % size
        )

    def _tables(self, chunks: Rows[Chunk], sequences: int) -> npt.NDArray[np.int32]:
        """[S, P] zeros, P the most pages any of these sequences has; the memory grows but is kept."""
        width = max(chunk.sequence.num_pages for chunk in chunks)
        needed = sequences * width
        if len(self._block_tables) < needed:
            self._block_tables = np.zeros(2 * needed, dtype=np.int32)
        tables = self._block_tables[:needed].reshape(sequences, width)
        tables.fill(0)
        return tables
