"""`RolloutInputs`: what a recorded chain reads: the first rows of every sequence, and who goes on how far."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engine.speculation.draft_batch import DraftRows
from tandem.engine.step.batch import counted, forward_batch, slots_of, to_gpu
from tandem.models.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """sequences: of a chain; rows: of each in its first pass; draft_tokens: of each, at most; pages: of the longest
    sequence."""

    sequences: int
    rows: int
    draft_tokens: int
    pages: int
    page_size: int

    @property
    def wide_bytes(self) -> int:
        """Bytes of the 64-bit inputs: ids, positions and places of the first rows, and of who goes on."""
        return 8 * (3 * self.sequences * self.rows + self.draft_tokens * self.sequences)

    @property
    def input_bytes(self) -> int:
        return self.wide_bytes + 4 * self.sequences * (self.pages + 1)


class RolloutInputs:
    """In pinned memory and on the device; a recording begins with a copy. At first all rows are of page 0.

    Every sequence has as many first rows: those that it has not are copies of its first one. Sequences that are not
    there are copies of the last one. Who goes on no further is from then on a copy of one that does. Copies compute and
    write the same.
    """

    def __init__(self, shape: RolloutShape, device: torch.device) -> None:
        self.shape, count = shape, shape.sequences * shape.rows
        self._host = torch.zeros(shape.input_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device_image = self._host.to(device, copy=True)
        ids, positions, places, self._order, tables, slots = (part.numpy() for part in self._views(self._host))
        each = [array.reshape(shape.sequences, shape.rows) for array in (ids, positions, places)]
        self._each: tuple[Any, ...] = (*each, tables, slots)
        self._widths: list[int] = []  # whose order is in the image
        self.ids, self.positions, self.places, self.order, self.tables, self.slots = self._views(self._device_image)
        self.starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        self.each = torch.arange(shape.sequences, device=device)
        self._owners = self.each.repeat_interleave(shape.rows)
        self._ends = (self.each + 1) * shape.rows - 1

    def _views(self, memory: Tensor) -> tuple[Tensor, ...]:
        s = self.shape
        wide, count = memory[: s.wide_bytes].view(torch.int64), s.sequences * s.rows
        ids, positions, places, order = wide.split([count, count, count, s.draft_tokens * s.sequences])
        tables, slots = memory[s.wide_bytes :].view(torch.int32).split([s.sequences * s.pages, s.sequences])
        return (
            ids,
            positions,
            places,
            order.view(s.draft_tokens, s.sequences),
            tables.view(s.sequences, s.pages),
            slots,
        )

    def fill(self, runs: Rows[DraftRows], widths: Rows[int]) -> None:
        """The image, after all that read the one before. The GPU waits for this."""
        for at, run in enumerate(runs):
            self._fill_rows(at, run)
        if len(runs) < self.shape.sequences:
            for array in self._each:
                array[len(runs) :] = array[len(runs) - 1]
        if self._widths != widths:
            self._fill_order(widths)
            self._widths = list(widths)

    def _fill_rows(self, at: int, run: DraftRows) -> None:
        """The first rows are copies of the run's first one."""
        ids, positions, places, tables, slots = self._each
        count, pages = len(run.tokens), run.sequence.num_pages
        missing = self.shape.rows - count
        tables[at, :pages] = run.sequence.page_table[:pages]
        slots[at] = run.sequence.slot
        row_slots = slots_of(tables[at], run.first, count, self.shape.page_size)
        ids[at, missing:], places[at, missing:] = run.tokens, row_slots
        positions[at, missing:] = counted(run.first, count)
        for array in (ids, positions, places):
            array[at, :missing] = array[at, missing]

    def _fill_order(self, widths: Rows[int]) -> None:
        """order[d, s]: whose row sequence s computes in pass d."""
        draft_tokens = np.zeros(self.shape.sequences, dtype=np.int64)
        draft_tokens[: len(widths)] = widths
        longest, own = int(draft_tokens.argmax()), np.arange(self.shape.sequences)
        for number in range(self.shape.draft_tokens):
            self._order[number] = np.where(draft_tokens > number, own, longest)

    def send(self) -> None:
        to_gpu(self._host, self._device_image)

    def first(self) -> ForwardBatch:
        """Batch of the first pass. Each row is a sequence of its own, as rows that decode are."""
        return self._batch(self.ids, self.positions, self.places, self._owners, self._ends)

    def next(self, ids: Tensor, positions: Tensor, owners: Tensor) -> ForwardBatch:
        """Batch of a later pass, one row of each; owners: whose pages."""
        size = self.shape.page_size
        pages = self.tables.index_select(0, owners).gather(1, (positions // size)[:, None])[:, 0]
        return self._batch(ids, positions, pages.long() * size + positions % size, owners, self.each)

    def _batch(
        self, ids: Tensor, positions: Tensor, places: Tensor, owners: Tensor, logits_rows: Tensor
    ) -> ForwardBatch:
        rows = len(ids)
        tensors = {
            "input_ids": ids, "positions": positions, "cache_slots": places, "query_starts": self.starts[: rows + 1],
            "seq_lens": (positions + 1).int(), "block_tables": self.tables.index_select(0, owners),
            "logits_rows": logits_rows, "slots": self.slots.index_select(0, owners),
        }  # fmt: skip
        return forward_batch(tensors, single_rows=rows)
