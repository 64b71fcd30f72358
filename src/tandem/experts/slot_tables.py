"""`SlotTables`: where the experts of every layer lie on the GPU, in one array that graphs read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.errors import EngineError

ALIGNED = 32  # entries: a row begins at a multiple of 128 bytes


class SlotTable(NamedTuple):
    """One layer's, int32 [experts]: the slot, or -1."""

    image: Tensor  # in pinned memory, changed first
    mirror: Tensor  # on the GPU


class SlotTables:
    """The image of all layers is copied at once: 98 KB and 2 us of PCIe for 48 x 512 experts. So the cost does not grow
    with the experts that have moved."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        shape = layers, -(-experts // ALIGNED) * ALIGNED
        self._image = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device_image = self._image.to(device, copy=True)

    def layer(self, index: int, experts: int) -> SlotTable:
        if experts > self._image.shape[1]:
            raise EngineError(f"layer {index} has {experts} experts, the first one {self._image.shape[1]}")
        return SlotTable(self._image[index, :experts], self._device_image[index, :experts])

    @property
    def copied(self) -> tuple[int, int, int]:
        """From where, to where, and bytes: after such a copy the GPU sees what the image says then."""
        return self._image.data_ptr(), self._device_image.data_ptr(), self._image.nbytes
