"""Shared keys on the C++ core."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.cpu_ops import CpuOps, heads_of
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.compressed_attention.torch import CompressedHeads
from tandem.mechanisms.compressed_attention.weights import CompressedWeights


class OwnKeys:
    """`Attend` on the C++ core: every row is a sequence of its own, whose one page is its keys."""

    def __init__(self, dense: _core.DenseOps) -> None:
        self._dense = dense

    def __call__(self, q: Tensor, keys: Tensor, counts: Tensor, scale: float, sinks: Tensor) -> Tensor:
        rows, width, head_dim = keys.shape
        each = torch.arange(rows + 1, dtype=torch.int32)
        view = _core.BatchView(
            positions=counts - 1, cache_slots=each[:rows].long() * width, query_starts=each, seq_lens=counts.int(),
            block_tables=each[:rows, None], page_size=width, num_pages=rows, slots=torch.zeros(rows, dtype=torch.int32),
        )  # fmt: skip
        out = torch.empty_like(q)
        shape, pages = heads_of(q.shape[1], 1, head_dim, 0, 0), keys.view(rows, width, 1, head_dim)
        self._dense.attention(view, shape, q, pages, None, out.view(rows, -1), scale, 0, sinks)
        return out


def bound(ops: CpuOps, shape: CompressedAttention, weights: CompressedWeights, fmt: str = "bf16") -> CompressedHeads:
    """Packs `weights.groups` once."""
    return CompressedHeads(shape, weights, OwnKeys(ops.dense), ops.per_head(weights.groups, fmt))
