"""`KeyTables`: says to the GPU which experts are streamed in a step, and where in their layer's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.kernels.gpu import pinned

UNKNOWN = -1  # no number of moves


class StreamableLayer(Protocol):
    """A layer some of whose experts are in CPU memory."""

    @property
    def cpu_slots(self) -> int: ...

    @property
    def first_key(self) -> int: ...

    def expert_cpu_slots(self, moving: bool = False) -> list[int]:
        """Each expert's place there, or -1. moving: some may have a place on both sides."""
        ...


class KeyTables:
    """int32 [layers, experts] on the GPU: the key of each expert that is streamed, -1 for others. It stays where it is,
    so graphs read it."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self._device_keys = torch.full((layers, experts), -1, dtype=torch.int32, device=device)
        self._image = torch.empty((layers, experts), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.cpu_slots = np.full((layers, experts), -1, dtype=np.int32)
        self._ranks: dict[int, npt.NDArray[np.int32]] = {}  # of a layer's slots
        self._counts: Mapping[int, int] = {}
        self._seen_moves: int | None = UNKNOWN

    def of(self, layer: int) -> Tensor:
        return self._device_keys[layer]

    def rank(self, layer: int, cpu_slots: npt.NDArray[np.int32]) -> None:
        """Its slots are streamed in this order from now on."""
        ranks = np.empty_like(cpu_slots)
        ranks[cpu_slots] = np.arange(len(cpu_slots), dtype=np.int32)
        self._ranks[layer], self._counts = ranks, {}

    def look(self, layers: Sequence[StreamableLayer | None], moves: int | None) -> None:
        """Who is where. moves: changes when experts have changed places; None: they may be doing so."""
        if moves is not None and moves == self._seen_moves:
            return
        for index, layer in enumerate(layers):
            if layer is not None:
                cpu_slots = layer.expert_cpu_slots(moves is None)
                self.cpu_slots[index, : len(cpu_slots)] = cpu_slots
        self._seen_moves, self._counts = moves, {}

    def tell(self, layers: Sequence[StreamableLayer | None], counts: Mapping[int, int]) -> None:
        """The first `counts[layer]` slots are streamed. The step before has ended, so the image is free."""
        if self._counts == counts:
            return
        image = self._image.numpy()
        image.fill(-1)
        for index, count in counts.items():
            layer, ranks = layers[index], self.cpu_slots[index]
            assert layer is not None
            if index in self._ranks:
                ranks = np.where(ranks >= 0, self._ranks[index][ranks], -1)
            image[index] = np.where((ranks >= 0) & (ranks < count), ranks + layer.first_key, -1)
        self._send()
        self._counts = counts

    def rows_left(self, rows: npt.NDArray[np.int64]) -> float | None:
        """Share of these rows, [layers, experts], that the CPU had of all of its experts', by what was told before the
        step: a mean over the layers. None: there were none."""
        width = min(rows.shape[1], self.cpu_slots.shape[1])  # shared experts are in one of them only
        ranks, keys = self.cpu_slots[:, :width], self._image.numpy()[:, :width]
        of_layer, left = ((rows[:, :width] * which).sum(1) for which in (ranks >= 0, (ranks >= 0) & (keys < 0)))
        used = of_layer > 0
        return float((left[used] / of_layer[used]).mean()) if used.any() else None

    def _send(self) -> None:
        pinned.read(self._image.view(torch.uint8), self._device_keys.view(torch.uint8))
