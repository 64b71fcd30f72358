"""`Uploads`: packed experts to GPU memory, while the next one is packed."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.packed_experts import PackedExperts

BUFFERS = 2  # one is filled while the other travels
PINNED_BYTES = 64 << 20  # at most, of a buffer: PyTorch keeps pinned memory for the next who asks


class Uploads:
    """Buffers of one packed expert each, taken in turn; pinned unless large, or on a CPU (tests)."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        pinned = self._on_gpu and nbytes <= PINNED_BYTES
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        self._plain = [torch.from_numpy(buffer.numpy()) for buffer in self._buffers]  # what the core takes
        self._arrived = [torch.cuda.Event() for _ in self._buffers] if self._on_gpu else []
        self._turn = 0

    def send(self, packer: PackedExperts, slot: Tensor) -> None:
        """Copies the packer's expert 0, which may be packed over after this, and begins to copy it to `slot`."""
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if self._on_gpu:
            self._arrived[turn].synchronize()  # returns at once if it was never recorded
        packer.copy_packed(0, self._plain[turn])
        slot.copy_(self._buffers[turn], non_blocking=True)
        if self._on_gpu:
            self._arrived[turn].record()

    def finish(self) -> None:
        """Waits until everything has arrived."""
        for event in self._arrived:
            event.synchronize()
