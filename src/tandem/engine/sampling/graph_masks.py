"""`GraphMasks`: where a CUDA graph finds the masks of its rows."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from tandem.engine.sampling.masks import RowMasks, TokenMask, masked_rows
from tandem.errors import EngineError


class GraphMasks:
    """`device_addresses`: int64 [size + 1] on the device, the addresses of masks in memory that it reads. 0: the row is
    free. The last is the address of two words; 0: nobody waits for them. The first is 0 until the masks are made. The
    device makes the second 1 when it has waited too long, and goes on with what it finds.

    A mask stays where it is while its answer goes on. So a step with the rows of the step before sends nothing.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._host = torch.zeros(size + 3, dtype=torch.int64, pin_memory=self._pinned)  # the last are the words
        self.device_addresses = torch.zeros(size + 1, dtype=torch.int64, device=device)
        self._word = self._host[-2:].numpy()  # as an array: PyTorch takes ten times as long to write a number
        self.sent: Rows[TokenMask | None] = ()  # held, or another mask could get the same memory

    def send(self, masks: RowMasks) -> None:
        """Sends the masks of the first rows; others are free. Call it before the graph is replayed; the step before
        must have ended. The graph waits for `make` before it reads a mask. Raises ValueError for a mask that a GPU
        cannot read."""
        masks = [] if all(mask is None for mask in masks) else list(masks)
        self._word[:] = 0
        if len(masks) == len(self.sent) and all(map(_same, masks, self.sent)):
            return
        self._host.zero_()
        for row, mask in enumerate(masks):
            if mask is not None:
                self._host[row] = self._address(mask)
        self._host[-3] = self._host[-2:].data_ptr() if masks else 0
        self.device_addresses.copy_(self._host[:-2], non_blocking=True)
        self.sent = masks

    def make(self, masks: Callable[[], None]) -> None:
        """While the graph runs: makes the masks, and lets it read them. It would wait for ever if that went wrong."""
        try:
            masks()
        finally:
            self._word[0] = 1

    def check(self) -> None:
        """When the graph has ended. Raises EngineError if it did not wait for the masks: its rows are then the best of
        those that were allowed before."""
        if self._word[1]:
            self._word[1] = 0
            raise EngineError("the masks of a step's grammars came too late for the GPU")

    def applied(self, logits: Tensor) -> Tensor:
        """Masked logits by PyTorch: the GPU's kernel does the same while it looks for the best token."""
        return masked_rows(logits, self.sent)

    def _address(self, mask: TokenMask) -> int:
        tensor = torch.from_numpy(mask)
        if self._pinned and not tensor.is_pinned():
            raise ValueError("a graph reads masks from pinned memory: make them with masks.new_mask")
        return tensor.data_ptr()


def _same(one: TokenMask | None, other: TokenMask | None) -> bool:
    return one is other
