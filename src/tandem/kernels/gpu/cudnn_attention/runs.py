"""Which chunks of a step are computed piece by piece: a chunk's own length decides, so its companions change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tandem.kernels.batch_layout import KernelBatch

LEAST_ROWS, LEAST_WORK = 1024, 1 << 36
"""From so many rows on a chunk is long if rows * rows * tokens is so much: 4096 from nothing, 2048 after 14336. Below,
Python needs longer to give cuDNN's kernels than they gain."""


class SequenceRun(NamedTuple):
    """Sequences of a step that are computed together, and their rows. before: tokens before the one chunk that goes
    piece by piece; None: others."""

    sequences: slice
    rows: slice
    before: int | None


def runs_of(batch: KernelBatch) -> tuple[SequenceRun, ...]:
    """Runs of a batch in host memory; (): no chunk is long."""
    sequences = len(batch.seq_lens)
    if len(batch.positions) < LEAST_ROWS + sequences - 1:
        return ()
    runs = tuple(_runs(batch.query_starts.tolist(), batch.seq_lens.tolist()))
    return runs if any(run.before is not None for run in runs) else ()


def _runs(starts: list[int], lengths: list[int]) -> Iterator[SequenceRun]:
    first = 0  # of the sequences that wait for their end
    for s, length in enumerate(lengths):
        rows = starts[s + 1] - starts[s]
        if rows < LEAST_ROWS or rows * rows * length < LEAST_WORK:
            continue
        if first < s:
            yield SequenceRun(slice(first, s), slice(starts[first], starts[s]), None)
        yield SequenceRun(slice(s, s + 1), slice(starts[s], starts[s + 1]), length - rows)
        first = s + 1
    if first < len(lengths):
        yield SequenceRun(slice(first, len(lengths)), slice(starts[first], starts[-1]), None)


def is_heavy(batch: KernelBatch) -> bool:
    """Whether a step in host memory is sooner ready kernel by kernel than as a graph, in which no length is known."""
    return bool(runs_of(batch))
