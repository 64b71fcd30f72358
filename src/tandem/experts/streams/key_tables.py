"""`KeyTables`: says to the GPU who travels in a step, and where in its layer's parts it will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.gpu.memory import pinned

UNKNOWN = -1  # no number of moves


class Keyed(Protocol):
    """A layer some of whose experts are in CPU memory."""

    @property
    def first_key(self) -> int: ...

    def found(self) -> list[int]:
        """Each expert's place there, or -1."""
        ...


class KeyTables:
    """int32 [layers, experts] on the GPU: the key of each expert that travels, -1 for others. It stays where it is, so
    graphs read it."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self._there = torch.full((layers, experts), -1, dtype=torch.int32, device=device)
        self._image = torch.empty((layers, experts), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._places = np.full((layers, experts), -1, dtype=np.int32)
        self._told: Mapping[int, int] = {}
        self._seen_moves: int | None = UNKNOWN

    def of(self, layer: int) -> Tensor:
        return self._there[layer]

    def tell(self, layers: Sequence[Keyed | None], counts: Mapping[int, int], moves: int | None) -> None:
        """The first `counts[layer]` places travel. moves: changes when experts have changed places; None: they may be
        doing so. The step before has ended, so the image is free."""
        if moves is None or moves != self._seen_moves:
            for index, layer in enumerate(layers):
                if layer is not None:
                    found = layer.found()
                    self._places[index, : len(found)] = found
            self._seen_moves, self._told = moves, {}
        if self._told == counts:
            return
        image = self._image.numpy()
        image.fill(-1)
        for index, count in counts.items():
            layer, places = layers[index], self._places[index]
            assert layer is not None
            image[index] = np.where((places >= 0) & (places < count), places + layer.first_key, -1)
        pinned.read(self._image.view(torch.uint8), self._there.view(torch.uint8))
        self._told = counts
