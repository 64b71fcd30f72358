"""Attention of all patches of an image to all."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class ImageShape(NamedTuple):
    """channels: of a head. tile: rows that ask at once, at most."""

    patches: int
    heads: int
    channels: int
    tile: int


class ImageAttention(Protocol):
    """Attention among the patches of an image, one block after the other."""

    def show(self, k: Tensor, v: Tensor) -> None:
        """A block's keys and values, [patches, heads, channels]."""
        ...

    def attend(self, q: Tensor) -> Tensor:
        """Attention of some patches to the block shown, q [n, heads, channels] → [n, heads * channels]."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """GELU, by tanh, of rows [n, width] between two products: where one thread computes, it takes longer than they
        do."""
        ...


class ByTorch:
    """Where torch computes."""

    def __init__(self, shape: ImageShape, dtype: torch.dtype) -> None:
        self._kv = torch.empty(0), torch.empty(0)

    def show(self, k: Tensor, v: Tensor) -> None:
        self._kv = k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    def attend(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], *self._kv)[0].transpose(0, 1).flatten(1)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")
