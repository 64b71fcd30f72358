"""`Uploads`: packed experts to GPU memory, while the next ones are packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BUFFERS = 2  # one is filled while the other travels
BUFFER_BYTES = (
    64 << 20
)  # of a buffer, or one expert: DMA of less than that is slower, and filling it takes longer
PINNED_BYTES = 256 << 20  # at most, of a buffer: PyTorch keeps pinned memory for the next who asks


class Uploads:
    """Buffers of a few packed experts each, taken in turn; pinned unless large, or on a CPU (tests)."""

    def __init__(self, pool: Tensor, stride: int, experts: int) -> None:
        """pool uint8 [slots * stride]: where they go; `experts` of them in all."""
        self._pool, self._stride, self._on_gpu = pool, stride, pool.is_cuda
        self.room = max(1, min(experts, BUFFER_BYTES // stride))  # experts of a buffer
        nbytes = self.room * stride
        pinned = self._on_gpu and nbytes <= PINNED_BYTES
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        self._plain = [torch.from_numpy(buffer.numpy()) for buffer in self._buffers]  # what the core takes
        self._arrived = [torch.cuda.Event() for _ in self._buffers] if self._on_gpu else []
        self._turn = 0

    def send(self, slots: Sequence[int], fill: Callable[[Tensor], None]) -> None:
        """`fill` writes the packed bytes of at most `room` experts into what it is given; then begins to copy each to
        its slot."""
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if self._on_gpu:
            self._arrived[turn].synchronize()  # returns at once if it was never recorded
        fill(self._plain[turn][: len(slots) * self._stride])
        for first, count in _side_by_side(slots):
            self._copy(self._buffers[turn], first, slots[first], count)
        if self._on_gpu:
            self._arrived[turn].record()

    def _copy(self, buffer: Tensor, first: int, slot: int, count: int) -> None:
        begin, to, nbytes = first * self._stride, slot * self._stride, count * self._stride
        self._pool[to : to + nbytes].copy_(buffer[begin : begin + nbytes], non_blocking=True)

    def finish(self) -> None:
        """Waits until everything has arrived."""
        for event in self._arrived:
            event.synchronize()


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
