"""How weights get to GPU memory: `Uploads` of packed experts, while the next ones are packed, and whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tandem._core import WorkerPool, copy_bytes

BUFFERS = 2  # one is filled while the other is copied
BUFFER_BYTES = (
    64 << 20
)  # of a buffer, or one expert: DMA of less than that is slower, and filling it takes longer
LEAST_BYTES = 1 << 20  # of a block; less is copied by PyTorch
PINNED_BYTES = 256 << 20  # at most, of a buffer: PyTorch keeps pinned memory for the next who asks


class Staging:
    """Two buffers in CPU memory, taken in turn; pinned unless large, or on a CPU (tests)."""

    def __init__(self, nbytes: int, gpu: bool) -> None:
        pinned = gpu and nbytes <= PINNED_BYTES
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        self._plain = [torch.from_numpy(buffer.numpy()) for buffer in self._buffers]  # what the core takes
        self._arrived = [torch.cuda.Event() for _ in self._buffers] if gpu else []
        self._turn = 0

    def send(self, nbytes: int, fill: Callable[[Tensor], object], to: Callable[[Tensor], object]) -> None:
        """`fill` writes that many bytes into what it is given, when what was sent from there has arrived; `to` begins
        to copy them on."""
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if self._arrived:
            self._arrived[turn].synchronize()  # returns at once if it was never recorded
        fill(self._plain[turn][:nbytes])
        to(self._buffers[turn][:nbytes])
        if self._arrived:
            self._arrived[turn].record()

    def finish(self) -> None:
        """Waits until everything has arrived."""
        for event in self._arrived:
            event.synchronize()


class Uploads:
    """Packed experts to their slots, a few in a buffer."""

    def __init__(self, pool: Tensor, stride: int, experts: int) -> None:
        """pool uint8 [slots * stride]: where they go; `experts` of them in all."""
        self._pool, self._stride = pool, stride
        self.room = max(1, min(experts, BUFFER_BYTES // stride))  # experts of a buffer
        self._staging = Staging(self.room * stride, pool.is_cuda)

    def send(self, slots: Sequence[int], fill: Callable[[Tensor], object]) -> None:
        """`fill` writes the packed bytes of at most `room` experts into what it is given; then begins to copy each to
        its slot."""
        self._staging.send(len(slots) * self._stride, fill, lambda buffer: self._copy(buffer, slots))

    def _copy(self, buffer: Tensor, slots: Sequence[int]) -> None:
        for first, count in _side_by_side(slots):
            begin, to, nbytes = first * self._stride, slots[first] * self._stride, count * self._stride
            self._pool[to : to + nbytes].copy_(buffer[begin : begin + nbytes], non_blocking=True)

    def finish(self) -> None:
        """Waits until everything has arrived."""
        self._staging.finish()


def uploaded(blocks: Sequence[Tensor], device: torch.device, workers: WorkerPool) -> Tensor:
    """[N, K] on the device, of blocks of rows in CPU memory or mapped files, which all workers read; in their type, or
    in one that holds all of theirs."""
    if len({block.dtype for block in blocks}) > 1:
        blocks = (torch.cat(tuple(blocks)),)
    first = blocks[0]
    whole = torch.empty((sum(map(len, blocks)), *first.shape[1:]), dtype=first.dtype, device=device)
    if min(block.nbytes for block in blocks) < LEAST_BYTES or not all(b.is_contiguous() for b in blocks):
        return whole.copy_(torch.cat(tuple(blocks)))
    each = (block.detach().view(torch.uint8).flatten().split(BUFFER_BYTES) for block in blocks)
    _send(chain.from_iterable(each), whole.view(torch.uint8).flatten(), workers)
    return whole


def uploaded_bytes(data: memoryview, device: torch.device, workers: WorkerPool) -> Tensor:
    """uint8 [its bytes] on the device."""
    whole = torch.empty(data.nbytes, dtype=torch.uint8, device=device)
    if data.nbytes < LEAST_BYTES:
        return whole.copy_(torch.from_numpy(np.array(data)))
    _send((data[at : at + BUFFER_BYTES] for at in range(0, data.nbytes, BUFFER_BYTES)), whole, workers)
    return whole


def _send(parts: Iterable[Tensor | memoryview], target: Tensor, workers: WorkerPool) -> None:
    """Parts of at most BUFFER_BYTES, one after the other into uint8 [their bytes]."""
    staging, end = Staging(min(BUFFER_BYTES, target.nbytes), target.is_cuda), 0
    for part in parts:
        destination = target[end : end + part.nbytes]
        staging.send(part.nbytes, partial(copy_bytes, workers, part), partial(destination.copy_, non_blocking=True))
        end += part.nbytes
    staging.finish()


def _side_by_side(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of slots that follow each other, as (where in `slots`, how many): one copy each."""
    runs: list[tuple[int, int]] = []
    for i, slot in enumerate(slots):
        if i and slot == slots[i - 1] + 1:
            first, count = runs.pop()
            runs.append((first, count + 1))
        else:
            runs.append((i, 1))
    return runs
