"""`BatchLayout`: where a batch's tensors lie in one block of memory. `forward_batch` is the only constructor of
`ForwardBatch`: batches that are filled, sent, replayed or drafted are made here.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.models.batch import ForwardBatch


class Axis(Enum):
    """What a tensor of a batch has one number of; a table has a row of pages of each sequence."""

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
    "folded": Field(torch.int32, Axis.SEQUENCE),
    "sure": Field(torch.int32, Axis.SEQUENCE),
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
    """Of a block of memory. pages: of the longest sequence. windowed: WINDOW_FIELDS are there twice."""

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


class _Span(NamedTuple):
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
        self._spans: dict[str, _Span] = {}
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
        self._spans[name] = _Span(first, self.nbytes, dtype, shape)

    def batch(self, memory: Tensor, **others: Tensor | None) -> ForwardBatch:
        """A batch whose tensors lie in uint8 [nbytes]. others: those that do not, or None in place of one that does."""
        tensors: dict[str, Tensor | None] = {n: span.of(memory) for n, span in self._spans.items() if n in FIELDS}
        own = {name: span.of(memory) for name in WINDOW_FIELDS if (span := self._spans.get(_WINDOW + name))}
        return forward_batch(tensors | others, own)

    def counted(self, memory: Tensor) -> Tensor:
        """int32 [1]."""
        return self._spans["counted"].of(memory)


class SequenceRows(NamedTuple):
    """Rows of one sequence: `tokens` from position `first` on. table: int32, its pages. logits: of the last rows."""

    tokens: Rows[int] | npt.NDArray[np.int64]
    first: int
    table: npt.NDArray[np.int32]
    slot: int
    logits: int = 1


def host_batch(parts: Rows[SequenceRows], page_size: int) -> ForwardBatch:
    """In host memory of its own, outside steps of the engine, which refill theirs (`BatchArrays`)."""
    counts = [len(part.tokens) for part in parts]
    starts = np.cumsum([0, *counts])
    positions = np.concatenate([np.arange(p.first, p.first + n) for p, n in zip(parts, counts, strict=True)])
    tables = np.zeros((len(parts), max(len(part.table) for part in parts)), dtype=np.int32)
    for table, part in zip(tables, parts, strict=True):
        table[: len(part.table)] = part.table
    pages = tables[np.repeat(np.arange(len(parts)), counts), positions // page_size].astype(np.int64)
    wanted = [np.arange(end - part.logits, end) for part, end in zip(parts, starts[1:], strict=True)]
    arrays = {
        "input_ids": np.concatenate([part.tokens for part in parts]),
        "positions": positions,
        "cache_slots": pages * page_size + positions % page_size,
        "query_starts": starts,
        "seq_lens": [part.first + count for part, count in zip(parts, counts, strict=True)],
        "block_tables": tables,
        "logits_rows": np.concatenate(wanted),
        "slots": [part.slot for part in parts],
    }
    return forward_batch({name: torch.as_tensor(array, dtype=FIELDS[name].dtype) for name, array in arrays.items()})


def moved(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """A copy of a batch in host memory. What is pinned stays as it is until the GPU has read it: a copy of CUDA's would
    wait for those of experts, and its caller, too."""

    def there(tensor: Tensor) -> Tensor:
        if device.type != "cuda" or not tensor.numel() or not tensor.is_pinned():
            return tensor.to(device, copy=True)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        to_gpu(tensor.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8))
        return target

    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    copies: dict[str, Any] = {name: there(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    copies["windows"] = None if batch.windows is None else moved(batch.windows, device)
    return replace(batch, **copies)


def to_gpu(image: Tensor, there: Tensor) -> None:
    """A batch's image in pinned memory, uint8 [4 n], becomes the batch on the GPU. It stays as it is until the GPU has
    read it. On a CPU, a plain copy."""
    if there.is_cuda:
        from tandem.kernels.gpu.memory import pinned  # Triton is there only where a GPU is used

        pinned.read(image, there)
    else:
        there.copy_(image)
