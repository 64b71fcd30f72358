"""Numbers of a table's rows that a step's tokens name: found on the host before a GPU begins the step.

What the last tokens of a sequence were lies in a ring of the C++ core, by its slot, as states of other mechanisms lie
in a GPU's memory. Plain torch (`torch.py`) takes ten times as long for one token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.batch_layout import TokenBatch
from tandem.kernels.ops import StoredTable
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import Hashes


class RowNumbers:
    """Row numbers of each step's tokens. Steps come in order, and copies of slots between them (`copied`)."""

    def __init__(self, shape: Ngram, hashes: Hashes) -> None:
        self._shape, self._numbers = shape, torch.empty((1, shape.hashes), dtype=torch.int64)
        multipliers, sizes, offsets = hashes
        own = multipliers.tolist(), sizes.clamp_min(1).tolist(), offsets.tolist()  # a trial's sizes are zeros
        self._core = _core.RowNumbers(shape.longest, shape.heads, shape.stop, *own)

    def __call__(self, batch: TokenBatch) -> Tensor:
        """int64 [T, hashes] of a batch in host memory, without the rows that only fill up a graph. Valid until the next
        call."""
        if len(batch.input_ids) > len(self._numbers):
            self._numbers = torch.empty((len(batch.input_ids), self._shape.hashes), dtype=torch.int64)
        rows = self._core.find(batch.input_ids, batch.positions, batch.slots, batch.query_starts, self._numbers)
        return self._numbers[:rows]

    def read(self, table: StoredTable, batch: TokenBatch, out: Tensor) -> int:
        """The rows themselves, one token's behind the other's, to the first bytes of `out`, in one call of the core; of
        how many tokens. Raises CheckpointError where one cannot be read."""
        return table.read_step(
            self._core, batch.input_ids, batch.positions, batch.slots, batch.query_starts, out
        )

    def last(self, tokens: int) -> Tensor:
        """As a call, of the step of up to so many tokens that `read` was called with last: finding them again would
        begin with what that step has left behind."""
        numbers = torch.empty((tokens, self._shape.hashes), dtype=torch.int64)
        return numbers[: self._core.last(numbers)]

    def copied(self, source: int, target: int) -> None:
        """One slot becomes another's copy."""
        self._core.copy(source, target)

    def of_text(self, tokens: list[int], first: int, end: int) -> Tensor:
        """int64 [end - first, hashes] of tokens [first, end) of a sequence that begins with tokens[0]. Nothing is
        kept."""
        back = self._shape.longest - 1
        ids = [self._shape.stop] * (back - first) + tokens[max(0, first - back) : end]
        numbers = torch.empty((len(ids) - back, self._shape.hashes), dtype=torch.int64)
        self._core.text(torch.tensor(ids), numbers)
        return numbers
