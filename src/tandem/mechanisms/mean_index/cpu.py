"""Choosing blocks of tokens on the C++ core."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.batch_views import checked
from tandem.kernels.cpu_ops import CpuOps, heads_of
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.mean_index.rows import as_sequences
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.mean_index.torch import ChooseBlocks, MeanWeights, close_blocks, normed_queries
from tandem.mechanisms.token_index.pooled import PooledKeys


class CpuMeanIndex:
    """`ChooseBlocks`: torch norms queries, and makes keys of blocks, of which a step has few."""

    def __init__(self, ops: CpuOps, shape: MeanIndex, weights: MeanWeights) -> None:
        self._ops, self._shape, self._weights = ops, shape, weights
        self._index = _core.TokenIndex(
            ops.pool, ops.tier, shape.heads, shape.dim, shape.rope.dims // 2, shape.budget, neighbours=False,
            tokens=shape.pool,
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, step: StepContext, cache: PooledKeys) -> SelectedKeys:
        s, w = self._shape, self._weights
        close_blocks(k, step.rows, cache, s, w)
        gates, queries = torch.ones((len(q), s.heads)), normed_queries(q, s, w).flatten(1)
        chosen = SelectedKeys(*(torch.empty(size, dtype=torch.int32) for size in ((len(q), s.most), (len(q),))))
        view = self._ops.view_of(step.batch, cache.tokens)
        self._index.choose(view, queries, None, gates, w.key, w.key, w.cos, w.sin, cache.keys, *chosen, s.norm.eps)
        return chosen

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, chosen: SelectedKeys, scale: float) -> Tensor:
        q, k, v, layout = as_sequences(q, k_pages, v_pages, chosen)
        out = q.new_empty((len(q), q.shape[1] * v.shape[3]))
        shape, view = heads_of(q.shape[1], k.shape[2], q.shape[2], 0, 0, v.shape[3]), checked(layout, len(k), 1)
        self._ops.dense.attention(view, shape, q, k, v, out, scale, 0, None)
        return out


def bound(ops: CpuOps, shape: MeanIndex, weights: MeanWeights) -> ChooseBlocks:
    return CpuMeanIndex(ops, shape, weights)
