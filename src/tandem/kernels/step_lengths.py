"""`lengths_of`: how long a step's sequences are, for kernels of prompts that are chosen by it.

A batch on a GPU comes from one in host memory, whose lengths are noted while it is copied. So no layer waits for the
GPU. Of a batch that nobody noted, the first layer does.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch

NOTED = 16  # batches at once: chunks of a prompt on several GPUs, a step beside them


class StepLengths(NamedTuple):
    """starts: first rows, [S + 1]; ends: lengths of sequences with their new rows, [S]. lens: on the device."""

    lens: weakref.ref[Tensor]
    starts: list[int]
    ends: list[int]


_noted: deque[StepLengths] = deque(maxlen=NOTED)


def note_lengths(batch: KernelBatch, host: KernelBatch) -> StepLengths:
    """host: the same batch, whose lengths can be read at once."""
    lengths = StepLengths(weakref.ref(batch.seq_lens), host.query_starts.tolist(), host.seq_lens.tolist())
    _noted.append(lengths)
    return lengths


def lengths_of(batch: KernelBatch) -> StepLengths:
    """Noted ones, or what the device says, for which this waits."""
    for lengths in tuple(_noted):  # another thread may note some meanwhile
        if lengths.lens() is batch.seq_lens:
            return lengths
    return note_lengths(batch, batch)
