"""`host_batch`: a batch in host memory of its own, outside steps of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.step.batch import FIELDS, forward_batch
from tandem.models.batch import ForwardBatch


class SequenceRows(NamedTuple):
    """Rows of one sequence: `tokens` from position `first` on. table: int32, its pages. logits: of the last rows."""

    tokens: Rows[int] | npt.NDArray[np.int64]
    first: int
    table: npt.NDArray[np.int32]
    slot: int
    logits: int = 1


def host_batch(parts: Rows[SequenceRows], page_size: int, pinned: bool = False) -> ForwardBatch:
    """Rows of some sequences as a batch. Steps of the engine refill theirs (`BatchArrays`). pinned: GPUs read it where
    it is."""
    counts = [len(part.tokens) for part in parts]
    starts = np.cumsum([0, *counts])
    positions = np.concatenate([np.arange(p.first, p.first + n) for p, n in zip(parts, counts, strict=True)])
    tables = np.zeros((len(parts), max(len(part.table) for part in parts)), dtype=np.int32)
    for table, part in zip(tables, parts, strict=True):
        table[: len(part.table)] = part.table
    pages = tables[np.repeat(np.arange(len(parts)), counts), positions // page_size].astype(np.int64)
    logits_rows = [np.arange(end - part.logits, end) for part, end in zip(parts, starts[1:], strict=True)]
    arrays = {
        "input_ids": np.concatenate([part.tokens for part in parts]),
        "positions": positions,
        "cache_slots": pages * page_size + positions % page_size,
        "query_starts": starts,
        "seq_lens": [part.first + count for part, count in zip(parts, counts, strict=True)],
        "block_tables": tables,
        "logits_rows": np.concatenate(logits_rows),
        "slots": [part.slot for part in parts],
    }
    tensors = {name: torch.as_tensor(array, dtype=FIELDS[name].dtype) for name, array in arrays.items()}
    return forward_batch({name: each.pin_memory() if pinned else each for name, each in tensors.items()})
