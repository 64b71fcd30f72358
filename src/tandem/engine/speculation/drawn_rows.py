"""A draft layer's rows as a batch."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.sequence import Sequence
from tandem.models.batch import ForwardBatch


class Run(NamedTuple):
    """Rows of one sequence from `first` on, with the tokens one behind them. wanted: the last one guesses."""

    sequence: Sequence
    first: int
    tokens: list[int]
    wanted: bool

    @property
    def last(self) -> int:
        return self.first + len(self.tokens) - 1


def parted(runs: Rows[Run], most: int) -> tuple[list[Run], list[Run]]:
    """What has to be made first: rows that guess nothing. And the last rows of those that do, at most so many."""
    before, last = [run for run in runs if not run.wanted], list[Run]()
    for run in (run for run in runs if run.wanted):
        early = max(0, len(run.tokens) - most)
        if early:
            before.append(Run(run.sequence, run.first, run.tokens[:early], False))
        last.append(Run(run.sequence, run.first + early, run.tokens[early:], True))
    return before, last


def batch_of(runs: Rows[Run], page_size: int) -> ForwardBatch:
    """In host memory."""
    starts = np.cumsum([0, *(len(run.tokens) for run in runs)])
    positions = np.concatenate([np.arange(run.first, run.first + len(run.tokens)) for run in runs])
    tables = np.zeros((len(runs), max(run.sequence.num_pages for run in runs)), dtype=np.int32)
    for table, run in zip(tables, runs, strict=True):
        table[: run.sequence.num_pages] = run.sequence.page_table[: run.sequence.num_pages]
    owners = np.repeat(np.arange(len(runs)), np.diff(starts))
    slots = tables[owners, positions // page_size].astype(np.int64) * page_size + positions % page_size
    ends = [end - 1 for run, end in zip(runs, starts[1:], strict=True) if run.wanted]
    return ForwardBatch(
        input_ids=torch.tensor([token for run in runs for token in run.tokens], dtype=torch.int64),
        positions=torch.from_numpy(positions.astype(np.int64)),
        cache_slots=torch.from_numpy(slots),
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=torch.tensor([run.first + len(run.tokens) for run in runs], dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        logits_rows=torch.tensor(ends, dtype=torch.int64),
        slots=torch.tensor([run.sequence.slot for run in runs], dtype=torch.int32),
    )
