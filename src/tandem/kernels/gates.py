"""Gates of attention heads and shared experts, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gated(x: Tensor, gate: Tensor | None, out: Tensor | None = None) -> Tensor:
    """As `Ops.gated`."""
    y = x if gate is None else x * gate.flatten(1).sigmoid()
    return y if out is None else out.add_(y)


def without_gates(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """q, k and v side by side, of what `Ops.rope_store` takes."""
    if qkv.shape[1] != 2 * (heads + kv_heads) * head_dim:
        return qkv
    q = 2 * heads * head_dim
    return torch.cat((qkv[:, :q].unflatten(1, (heads, 2, head_dim))[:, :, 0].flatten(1), qkv[:, q:]), dim=1)
