"""`StagedRows`: a step's rows of a table, found on the host and left in pinned memory, where the step's kernels read
them. The table itself stays where it is, as it is stored."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.errors import CheckpointError
from tandem.kernels.batch_layout import TokenBatch
from tandem.kernels.gpu import pinned
from tandem.kernels.ops import StoredTable
from tandem.kernels.unread_rows import NO_NUMBER, unread_rows, unread_tokens
from tandem.mechanisms.ngrams.numbers import RowNumbers
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import NgramWeights

WORD = 4  # bytes that kernels read at a time


class StagedRows:
    """`begin` before each step, in the order of steps; `rows` within it, in a graph or not.

    Each graph has memory of its own, by its number of rows: its address must stay. All other steps share some.
    """

    def __init__(self, shape: Ngram, weights: NgramWeights, device: torch.device) -> None:
        self._shape, self._find, self._device = shape, weights.find, device
        self.numbers = RowNumbers(shape, weights.hashes)
        self._stored = self._find if isinstance(self._find, StoredTable) and self._find.anywhere else None
        row_bytes = 2 * shape.table.width if self._stored is None else self._stored.row_bytes
        self._token_bytes = shape.hashes * row_bytes
        self._shared, self._of_graphs = self._memory(weights.rows), dict[int, Tensor]()
        self._read = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(each.nbytes for each in (self._shared, *self._of_graphs.values()))

    def begin(self, batch: TokenBatch, captured: bool) -> None:
        """Finds the rows of a batch in host memory. captured: its kernels are a graph's, or will be."""
        size, each = batch.input_ids.numel(), self._token_bytes  # `len` takes as long as the call of the core
        if captured and size not in self._of_graphs:
            self._of_graphs[size] = self._memory(size)
        if not captured and self._read is not None:
            self._read.synchronize()  # the step before may still read
        memory = self._of_graphs[size] if captured else self._shared
        rows = self._fill(batch, memory)
        if rows < size:  # rows that only fill up a graph are copies of the last one
            memory[rows * each : size * each].view(-1, each)[:] = memory[(rows - 1) * each : rows * each]

    def _fill(self, batch: TokenBatch, memory: Tensor) -> int:
        """Rows of a batch's tokens at the front of `memory`; of how many tokens."""
        if self._stored is not None:
            try:
                return self.numbers.read(self._stored, batch, memory)
            except CheckpointError:  # of some tokens alone
                numbers = self.numbers.last(len(batch.input_ids))
        else:
            numbers = self.numbers(batch)
        each = self._token_bytes

        def read(part: slice) -> None:
            self._read_rows(numbers[part].view(-1), memory[part.start * each : part.stop * each])

        if unread := unread_tokens(read, len(numbers)):
            unread_rows.tell(batch, unread)
            for token in unread:
                memory[token * each : (token + 1) * each] = NO_NUMBER
        return len(numbers)

    def rows(self, count: int) -> Tensor:
        """[count, width] on the device, of the stored type or float32: the rows of the step that has begun."""
        captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        source = (self._of_graphs[count] if captured else self._shared)[: -(-count * self._token_bytes // WORD) * WORD]
        there = torch.empty(len(source), dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            pinned.read(source, there)
            if not captured and self._read is not None:
                self._read.record()
        else:
            there.copy_(source)
        rows = there[: count * self._token_bytes].view(count * self._shape.hashes, -1)
        numbers = rows.view(torch.bfloat16) if self._stored is None else self._stored.decode(rows)
        return numbers.view(count, self._shape.width)

    def copied(self, source: int, target: int) -> None:
        """One slot becomes another's copy."""
        self.numbers.copied(source, target)

    def _memory(self, rows: int) -> Tensor:
        nbytes = -(-rows * self._token_bytes // WORD) * WORD
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _read_rows(self, numbers: Tensor, out: Tensor) -> None:
        if self._stored is None:
            out.copy_(self._find(numbers).to(torch.bfloat16).view(torch.uint8).view(-1))
        else:
            self._stored.read(numbers, out)
