"""`Border`: rows of a chunk on their way from one stage to the next, while both compute other chunks.

Each GPU computes in the order in which it was given work, on its current stream. Copies run on two streams of their
own: one where the rows are, one where they go to, for PyTorch orders a copy behind both. So a copy waits for the stage
that leaves its rows, and for the reader of the buffer that it fills, not for what else the two GPUs have to do.

The next stage has two buffers: it reads one while the other is filled. Rows that were left lie in memory that the stage
before will use again, so that goes on behind the copy, which takes microseconds to a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.models.staged import Carry
from tandem.planner.stages.chunks import BORDER_BUFFERS as BUFFERS


class Border(Protocol):
    """The way from a stage to the next. One chunk after the other. leaves: the second stage gets rows of its own."""

    leaves: bool

    def crossing(self) -> Any:
        """A context: the chunk's tensors cross in it, by the `Carry` that it gives; then the stage may read them."""
        ...

    def passed(self) -> None:
        """The stage was given all that reads the chunk's rows."""
        ...


class SameDevice:
    """Both stages are on one device: the second one reads what the first one has written."""

    leaves = False

    @contextmanager
    def crossing(self) -> Iterator[Carry]:
        yield lambda source: source

    def passed(self) -> None:
        """Nothing is kept."""


class BetweenGpus:
    """From one GPU to another."""

    leaves = True

    def __init__(self, before: torch.device, after: torch.device, rows: int) -> None:
        """rows: of a chunk, at most."""
        self._before, self._after, self._rows = before, after, rows
        self._leaving, self._arriving = torch.cuda.Stream(before), torch.cuda.Stream(after)
        self._buffers: list[list[Tensor]] = []  # of each tensor that crosses
        self._read: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._chunks = 0

    @property
    def _turn(self) -> int:
        return self._chunks % BUFFERS

    @contextmanager
    def crossing(self) -> Iterator[Carry]:
        read, numbers = self._read[self._turn], count()
        if read is not None:
            self._arriving.wait_event(read)

        def carry(source: Tensor) -> Tensor:
            target = self._buffers_of(next(numbers), source)[self._turn]
            return self._copied(source, target[: len(source)])

        yield carry
        torch.cuda.current_stream(self._after).wait_stream(self._arriving)
        torch.cuda.current_stream(self._before).wait_stream(self._leaving)  # it will use the memory again

    def passed(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._after))
        self._read[self._turn] = event
        self._chunks += 1

    def _copied(self, source: Tensor, target: Tensor) -> Tensor:
        rows = source.contiguous()
        self._leaving.wait_stream(torch.cuda.current_stream(self._before))
        with torch.cuda.stream(self._leaving), torch.cuda.stream(self._arriving):
            target.copy_(rows, non_blocking=True)
        if rows is not source:
            rows.record_stream(self._leaving)  # nobody has this copy from here on
        return target

    def _buffers_of(self, number: int, source: Tensor) -> list[Tensor]:
        """Buffers of a chunk's tensor of this number, for as many rows as any chunk has. What the GPU was given before
        may still read their memory."""
        if number == len(self._buffers):
            shape = self._rows, *source.shape[1:]
            buffers = [torch.empty(shape, dtype=source.dtype, device=self._after) for _ in range(BUFFERS)]
            self._arriving.wait_stream(torch.cuda.current_stream(self._after))
            self._buffers.append(buffers)
        return self._buffers[number]


def border(before: torch.device, after: torch.device, rows: int) -> Border:
    """rows: of a chunk, at most."""
    return SameDevice() if before == after else BetweenGpus(before, after, rows)
