"""A draft layer's rows as a batch."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

from tandem.engine.sequence import Sequence
from tandem.engine.step.host_batch import SequenceRows, host_batch
from tandem.models.batch import ForwardBatch


class DraftRows(NamedTuple):
    """Rows of one sequence from `first` on, with the tokens one behind them. wanted: the last one drafts."""

    sequence: Sequence
    first: int
    tokens: list[int]
    wanted: bool

    @property
    def last(self) -> int:
        return self.first + len(self.tokens) - 1


def parted(runs: Rows[DraftRows], most: int) -> tuple[list[DraftRows], list[DraftRows]]:
    """Runs to make first, whose rows draft nothing, and the last rows of runs that draft, at most `most` each."""
    before, last = [run for run in runs if not run.wanted], list[DraftRows]()
    for run in (run for run in runs if run.wanted):
        early = max(0, len(run.tokens) - most)
        if early:
            before.append(DraftRows(run.sequence, run.first, run.tokens[:early], False))
        last.append(DraftRows(run.sequence, run.first + early, run.tokens[early:], True))
    return before, last


def batch_of(runs: Rows[DraftRows], page_size: int) -> ForwardBatch:
    """In host memory."""
    return host_batch([_rows_of(run, run.sequence) for run in runs], page_size)


def _rows_of(run: DraftRows, sequence: Sequence) -> SequenceRows:
    table = sequence.page_table[: sequence.num_pages]
    return SequenceRows(run.tokens, run.first, table, sequence.slot, int(run.wanted))
