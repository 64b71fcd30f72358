"""`GraphMasks`: where a CUDA graph finds the masks of its rows."""

from __future__ import annotations

import torch

from tandem.engine.sampling.masks import RowMasks, mask_words


class GraphMasks:
    """`there`: int32 [size, 1 + words] on the device. A row's first number says whether the row is masked.

    A step without masks sends nothing, and its kernels read the first numbers only.
    """

    def __init__(self, size: int, vocab: int, device: torch.device) -> None:
        shape = size, 1 + mask_words(vocab)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.there = torch.zeros(shape, dtype=torch.int32, device=device)
        self._rows = self._host.numpy()
        self._masked = 0  # rows up to the last one that is masked on the device

    def send(self, masks: RowMasks) -> None:
        """Of the first rows; others are free. Before the graph is replayed; the step before must have ended."""
        rows = max((i + 1 for i, mask in enumerate(masks) if mask is not None), default=0)
        self._rows[: self._masked, 0] = 0
        for row, mask in zip(self._rows, masks, strict=False):
            if mask is not None:
                row[0], row[1:] = 1, mask
        changed = max(rows, self._masked)
        self._masked = rows
        if changed:
            self.there[:changed].copy_(self._host[:changed], non_blocking=True)
