"""Gates of attention heads and shared experts, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.spec.state import LANES


def gated(x: Tensor, gate: Tensor | None, out: Tensor | None = None) -> Tensor:
    """As `Ops.gated`."""
    y = x if gate is None else _times(x, in_whole_vectors(torch.sigmoid, gate.flatten(1)))
    return y if out is None else out.add_(y)


def in_whole_vectors(of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`of` each number of x [T, n]. Torch takes two vectors at a time, and computes what is left over in another way:
    without filling up rows, bits would depend on the rows beside."""
    whole = F.pad(x, (0, -x.shape[1] % (2 * LANES)))
    return of(whole)[:, : x.shape[1]]


def _times(x: Tensor, shares: Tensor) -> Tensor:
    """x [T, n] times shares [T, H], one for each n / H numbers."""
    product: Tensor = x.unflatten(1, (shares.shape[1], -1)) * shares[..., None]
    return product.flatten(1)


def without_gates(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """q, k and v side by side, of what `Ops.rope_store` takes."""
    if qkv.shape[1] != 2 * (heads + kv_heads) * head_dim:
        return qkv
    q = 2 * heads * head_dim
    return torch.cat((qkv[:, :q].unflatten(1, (heads, 2, head_dim))[:, :, 0].flatten(1), qkv[:, q:]), dim=1)
