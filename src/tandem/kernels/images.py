"""Operations of a vision tower between its products: rotation, attention of all patches to all, norms, GELU."""

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


class PatchRotation(NamedTuple):
    """cos, sin float32 [patches, channels of a head]; both halves of the channels are alike."""

    cos: Tensor
    sin: Tensor


def turned(x: Tensor, turns: PatchRotation, rows: slice) -> Tensor:
    """x [n, heads, channels] of these rows, turned in halves, in float32."""
    wide, cos, sin = x.float(), turns.cos[rows, None], turns.sin[rows, None]
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class ImageOps(Protocol):
    """Operations of one image, block after block: all rows of a block are split before any attends."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """x [n, width] → [n, width]."""
        ...

    def split(self, qkv: Tensor, rows: slice) -> Tensor:
        """qkv [n, 3, heads, channels] of these patches → their queries, turned, as `attend` takes them. Keys, turned,
        and values are kept."""
        ...

    def attend(self, q: Tensor) -> Tensor:
        """Attention of some queries to all patches → [n, heads * channels]."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """GELU, by tanh, of rows [n, width] between two products; may be computed in place."""
        ...


class ByTorch:
    """`ImageOps` where torch computes."""

    def __init__(self, shape: ImageShape, dtype: torch.dtype, turns: PatchRotation) -> None:
        self._turns, device = turns, turns.cos.device
        self._kv = torch.empty(2, shape.patches, shape.heads, shape.channels, dtype=dtype, device=device)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def split(self, qkv: Tensor, rows: slice) -> Tensor:
        q, k, v = qkv.unbind(1)
        self._kv[0, rows], self._kv[1, rows] = turned(k, self._turns, rows), v
        return turned(q, self._turns, rows)

    def attend(self, q: Tensor) -> Tensor:
        k, v = self._kv.transpose(1, 2)[:, None]
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v)[0].transpose(0, 1).flatten(1)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")
