"""`BatchLayout`: where a batch's tensors lie in one block of memory. `BatchArrays`: the memory of a step's batch.

`forward_batch` is the only constructor of `ForwardBatch`, for steps, graphs, drafts and benches.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.sequence import BatchedChunk, BatchedSequence
from tandem.engine.vision.sequence_images import image_rows_of, turns_of
from tandem.kernels.step_lengths import note_lengths
from tandem.models.batch import ForwardBatch, ImageRowBatch


class Axis(Enum):
    """The unit that a batch's tensor has one number of; a table has a row of pages of each sequence."""

    ROW = auto()
    SEQUENCE = auto()
    START = auto()  # one more than sequences
    LOGITS = auto()
    TABLE = auto()


class Field(NamedTuple):
    dtype: torch.dtype
    axis: Axis


FIELDS = {
    "input_ids": Field(torch.int64, Axis.ROW),
    "positions": Field(torch.int64, Axis.ROW),
    "cache_slots": Field(torch.int64, Axis.ROW),
    "query_starts": Field(torch.int32, Axis.START),
    "seq_lens": Field(torch.int32, Axis.SEQUENCE),
    "block_tables": Field(torch.int32, Axis.TABLE),
    "logits_rows": Field(torch.int64, Axis.LOGITS),
    "slots": Field(torch.int32, Axis.SEQUENCE),
    "state_lens": Field(torch.int32, Axis.SEQUENCE),
    "num_verified": Field(torch.int32, Axis.SEQUENCE),
    "turns": Field(torch.int64, Axis.ROW),
}
WINDOW_FIELDS = "cache_slots", "block_tables"
"""Those that layers with a window have of their own."""
_WINDOW = "window "  # before the name of such a field, in a layout


def forward_batch(
    tensors: dict[str, Any], windows: dict[str, Any] | None = None, *, single_rows: int = 0
) -> ForwardBatch:
    """tensors: by their names in FIELDS. windows: WINDOW_FIELDS of layers that see a window, if they have their own."""
    batch = ForwardBatch(**tensors, single_rows=single_rows)
    if windows:
        batch.windows = replace(batch, **windows)
    return batch


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes of a block of memory. pages: of the longest sequence. windowed: WINDOW_FIELDS are there twice."""

    rows: int
    sequences: int
    pages: int
    logits: int = 0
    windowed: bool = False

    def shape(self, name: str) -> tuple[int, ...]:
        axis = FIELDS[name].axis
        if axis is Axis.TABLE:
            return self.sequences, self.pages
        counts = {
            Axis.ROW: self.rows, Axis.SEQUENCE: self.sequences, Axis.START: self.sequences + 1, Axis.LOGITS: self.logits
        }  # fmt: skip
        return (counts[axis],)


class _FieldSpan(NamedTuple):
    """A tensor's bytes."""

    first: int
    last: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.first : self.last].view(self.dtype).view(self.shape)


class BatchLayout:
    """Tensors of 64 bits first, then those of 32. So an image of all of them is one copy."""

    def __init__(self, sizes: BatchSizes, names: Rows[str], *, aligned: int = 8, counted: bool = False) -> None:
        """names: of FIELDS, in their order. aligned: bytes that what has 32 bits begins at a multiple of. counted: an
        int32 more at the end, how many of the rows are a step's."""
        self._spans: dict[str, _FieldSpan] = {}
        self.nbytes = 0
        for width in (torch.int64, torch.int32):
            self.nbytes = -(-self.nbytes // aligned) * aligned if width is torch.int32 else 0
            for name in (name for name in names if FIELDS[name].dtype is width):
                self._add(name, width, sizes.shape(name))
                if sizes.windowed and name in WINDOW_FIELDS:
                    self._add(_WINDOW + name, width, sizes.shape(name))
        if counted:
            self._add("counted", torch.int32, (1,))

    def _add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        first, self.nbytes = self.nbytes, self.nbytes + dtype.itemsize * int(np.prod(shape))
        self._spans[name] = _FieldSpan(first, self.nbytes, dtype, shape)

    def batch(self, memory: Tensor, **others: Tensor | None) -> ForwardBatch:
        """A batch whose tensors lie in uint8 [nbytes]. others: those that do not, or None in place of one that does."""
        tensors: dict[str, Tensor | None] = {n: span.of(memory) for n, span in self._spans.items() if n in FIELDS}
        own = {name: span.of(memory) for name in WINDOW_FIELDS if (span := self._spans.get(_WINDOW + name))}
        return forward_batch(tensors | others, own)

    def counted(self, memory: Tensor) -> Tensor:
        """int32 [1]."""
        return self._spans["counted"].of(memory)


class Numbers:
    """An array whose first numbers are a step's. A step of as many as the one before has the same tensor: making one
    takes longer than what is written into it."""

    def __init__(self, dtype: torch.dtype, count: int, pinned: bool) -> None:
        self._all = self._first = torch.zeros(count, dtype=dtype, pin_memory=pinned)
        self.array = self._all.numpy()

    def first(self, count: int) -> Tensor:
        if self._first.shape[0] != count:
            self._first = self._all[:count]
        return self._first


class PageRows:
    """Where rows lie in pages of one kind: those of all tokens, or those of windows."""

    def __init__(self, page_size: int, max_step_tokens: int, windowed: bool, pinned: bool) -> None:
        self._page_size, self._windowed, self._pinned = page_size, windowed, pinned
        self._cache_slots = Numbers(torch.int64, max_step_tokens, pinned)
        self._memory = torch.zeros(0, dtype=torch.int32)
        self._show(0, 0)

    def begin(self, chunks: Rows[BatchedChunk], sequences: int) -> None:
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

    def place(self, row: int, sequence: BatchedSequence, first: int, count: int) -> None:
        """So many rows from `row` on are at positions from `first` on."""
        slots = slots_of(self._table(sequence), first, count, self._page_size)
        self._cache_slots.array[row : row + count] = slots

    def describe(self, which: slice, sequence: BatchedSequence) -> None:
        self._tables[which, : sequence.num_pages] = self._table(sequence)[: sequence.num_pages]

    def fill_single(self, sequences: Rows[BatchedSequence], first: npt.NDArray[np.int64]) -> None:
        """Sequence i has one row, row i, at position first[i]."""
        counts = [sequence.num_pages for sequence in sequences]
        tables = [s.window_table for s in sequences] if self._windowed else [s.page_table for s in sequences]
        for row, own, count in zip(self._tables, tables, counts, strict=True):
            row[:count] = own[:count]
        pages = self._tables[np.arange(len(first)), first // self._page_size]
        self._cache_slots.array[: len(first)] = pages.astype(np.int64) * self._page_size + first % self._page_size

    def slots(self, rows: int) -> Tensor:
        return self._cache_slots.first(rows)

    def _table(self, sequence: BatchedSequence) -> npt.NDArray[np.int32]:
        return sequence.window_table if self._windowed else sequence.page_table


MANY_SINGLE = 8
"""Chunks of one row, from so many on array by array. Chunk by chunk 1, 8 and 256 of them took 17, 78 and 2,471 us on a
Zen 5 core, array by array 32, 42 and 511."""


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
        speculative: bool = False,
        row_per_sequence: bool = False,
        windowed: bool = False,
        each_row: bool = False,
        pinned: bool = False,
        images_from: int = 0,
    ) -> None:
        """speculative: steps may have rows of drafts. row_per_sequence: each row of such a step is a sequence of its
        own, as rows that decode are: it sees the tokens before it in the same pages. So kernels and CUDA graphs for
        rows that decode compute it, with the same bits. windowed: layers that see a window have pages of their own.
        each_row: so it is in every step, prompts included; then every step takes the road of one with drafts, too.
        pinned: a GPU reads them where they are. images_from: rows of rotary tables from there on are for pieces of
        images; 0: no sequence has any."""
        self._images_from = images_from
        self._row_per_sequence, self._speculative, self._each_row = row_per_sequence, speculative, each_row
        kinds = (False, True) if windowed else (False,)
        self._places = [PageRows(page_size, max_step_tokens, kind, pinned) for kind in kinds]
        self._input_ids, self._positions, self._logits_rows = (
            Numbers(FIELDS[name].dtype, max_step_tokens, pinned) for name in ("input_ids", "positions", "logits_rows")
        )
        self._seq_lens, self._slots, self._state_lens, self._num_verified = (
            Numbers(FIELDS[name].dtype, max_step_tokens, pinned)
            for name in ("seq_lens", "slots", "state_lens", "num_verified")
        )
        self._query_starts = Numbers(FIELDS["query_starts"].dtype, max_step_tokens + 1, pinned)
        self._counting = np.arange(max_step_tokens, dtype=np.int64)

    def fill(self, chunks: Rows[BatchedChunk]) -> ForwardBatch:
        """The chunks in host memory; valid until the next `fill`."""
        by_row = self._each_row or (self._row_per_sequence and any(chunk.draft_tokens for chunk in chunks))
        rows = sum([chunk.length for chunk in chunks])
        sequences = rows if by_row else len(chunks)
        folds = self._speculative and (self._each_row or not all(map(_is_plain, chunks)))
        for places in self._places:
            places.begin(chunks, sequences)
        fill = self._fill_single if rows == len(chunks) >= MANY_SINGLE else self._fill_any
        logits = fill(chunks, by_row, folds)
        whole, *others = self._places
        tensors: dict[str, Any] = {
            "input_ids": self._input_ids.first(rows),
            "positions": self._positions.first(rows),
            "cache_slots": whole.slots(rows),
            "query_starts": self._query_starts.first(sequences + 1),
            "seq_lens": self._seq_lens.first(sequences),
            "block_tables": whole.tables,
            "logits_rows": self._logits_rows.first(logits),
            "slots": self._slots.first(sequences),
            "state_lens": self._state_lens.first(sequences) if folds else None,
            "num_verified": self._num_verified.first(sequences) if folds and not self._row_per_sequence else None,
        }
        if self._images_from and (turns := turns_of(chunks)) is not None:
            tensors |= {"turns": turns, "image_rows": image_rows_of(chunks, turns, self._images_from)}
        windows = {"cache_slots": others[0].slots(rows), "block_tables": others[0].tables} if others else None
        each_single = by_row or rows == sequences
        single = sequences if each_single else sum(1 for _ in takewhile(lambda c: c.length == 1, chunks))
        return forward_batch(tensors, windows, single_rows=single)

    def _fill_any(self, chunks: Rows[BatchedChunk], by_row: bool, folds: bool) -> int:
        """Chunk by chunk; how many rows have logits."""
        s = row = logits = 0
        for chunk in chunks:
            self._place(row, chunk)
            row += chunk.length
            s += self._describe(s, chunk, row, by_row, folds)
            self._logits_rows.array[logits : logits + chunk.logits] = self._counting[row - chunk.logits : row]
            logits += chunk.logits
        return logits

    def _fill_single(self, chunks: Rows[BatchedChunk], by_row: bool, folds: bool) -> int:
        """As `_fill_any`, of chunks of one row each, array by array."""
        count, sequences = len(chunks), [chunk.sequence for chunk in chunks]
        places = [chunk.sequence.computed_len + chunk.offset for chunk in chunks]
        first = np.array(places, dtype=np.int64)
        self._input_ids.array[:count] = [s.tokens[at] for s, at in zip(sequences, places, strict=True)]
        self._positions.array[:count] = first
        self._query_starts.array[1 : count + 1] = self._counting[:count] + 1
        self._seq_lens.array[:count] = first + 1
        self._slots.array[:count] = [sequence.slot for sequence in sequences]
        if folds:
            self._state_lens.array[:count] = [sequence.state_len for sequence in sequences]
            self._num_verified.array[:count] = 1
        for pages in self._places:
            pages.fill_single(sequences, first)
        rows = [row for row, chunk in enumerate(chunks) if chunk.logits]
        self._logits_rows.array[: len(rows)] = rows
        return len(rows)

    def _describe(self, s: int, chunk: BatchedChunk, row_end: int, by_row: bool, folds: bool) -> int:
        """The chunk as sequence s, or its rows as sequences from s on; how many that are. folds: whether somebody asks
        what their slots hold."""
        sequence, count = chunk.sequence, chunk.length if by_row else 1
        which, end = slice(s, s + count), chunk.first + chunk.length
        for i in range(count):
            left = count - 1 - i
            self._query_starts.array[s + i + 1], self._seq_lens.array[s + i] = row_end - left, end - left
        self._slots.array[which] = sequence.slot
        if folds:
            self._state_lens.array[which], self._num_verified.array[which] = sequence.state_len, chunk.num_verified
        for places in self._places:
            places.describe(which, sequence)
        return count

    def _place(self, row: int, chunk: BatchedChunk) -> None:
        first, rows = chunk.first, slice(row, row + chunk.length)
        self._input_ids.array[rows] = chunk.tokens
        self._positions.array[rows] = counted(first, chunk.length)
        for places in self._places:
            places.place(row, chunk.sequence, first, chunk.length)


def regions(images_from: int, max_step_tokens: int) -> tuple[int, int]:
    """Where rotary tables have rows for pieces of images of a step, and of a chunk between steps."""
    return images_from, images_from + max_step_tokens if images_from else 0


def slots_of(table: npt.NDArray[np.int32], first: int, count: int, size: int) -> npt.NDArray[np.int64] | int:
    """Slots of `count` positions from `first` on, in pages of `size`. Most rows of few lie in one page: NumPy would
    take several times as long to look up each."""
    page = first // size
    if (first + count - 1) // size == page:
        return counted(int(table[page]) * size + first % size, count)
    positions = np.arange(first, first + count)
    return table[positions // size].astype(np.int64) * size + positions % size


def counted(first: int, count: int) -> npt.NDArray[np.int64] | int:
    """From `first` on."""
    return first if count == 1 else np.arange(first, first + count)


def _is_plain(chunk: BatchedChunk) -> bool:
    """It has no drafts and follows none: its slot's folds hold all that is computed."""
    return not chunk.draft_tokens and chunk.sequence.state_len == chunk.sequence.computed_len


def moved(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """A copy of a batch in host memory. What is pinned stays as it is until the GPU has read it: a copy of CUDA's would
    wait for those of experts, and its caller, too."""

    def to_device(tensor: Tensor) -> Tensor:
        if device.type != "cuda" or not tensor.numel() or not tensor.is_pinned():
            return tensor.to(device, copy=True)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        to_gpu(tensor.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8))
        return target

    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    copies: dict[str, Any] = {name: to_device(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    copies["image_rows"] = None if batch.image_rows is None else image_rows_on(batch.image_rows, device)
    copies["windows"] = None if batch.windows is None else moved(batch.windows, device)
    device_batch = replace(batch, **copies)
    note_lengths(device_batch, batch)
    return device_batch


def image_rows_on(images: ImageRowBatch, device: torch.device) -> ImageRowBatch:
    """A copy, where it is not there yet."""
    rows, features, places = (tensor.to(device) for tensor in (images.rows, images.features, images.places))
    return ImageRowBatch(rows, features, places, images.first)


def to_gpu(image: Tensor, target: Tensor) -> None:
    """A batch's image in pinned memory, uint8 [4 n], becomes the batch on the GPU. It stays as it is until the GPU has
    read it. On a CPU, a plain copy."""
    if target.is_cuda:
        from tandem.kernels.gpu import pinned  # Triton is there only where a GPU is used

        pinned.read(image, target)
    else:
        target.copy_(image)
