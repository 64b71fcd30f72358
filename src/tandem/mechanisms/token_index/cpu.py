"""Choosing tokens, and attention over them, on the C++ core."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.token_index.pooled import KeyPoolWeights, PooledIndex, PooledKeys, close_pools
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights, TokenIndex


class Views(Protocol):
    """Worker pool and checked indices, shared with a step's other operations."""

    pool: _core.WorkerPool
    tier: str

    def view_of(self, batch: KernelBatch, pages: Tensor) -> _core.BatchView:
        """The step's checked indices."""
        ...


class CpuTokenIndex:
    """`TokenIndex`."""

    def __init__(self, ops: Views, shape: Index, weights: IndexWeights) -> None:
        self._ops, self._shape, self._weights = ops, shape, weights
        self._index = _core.TokenIndex(
            ops.pool, ops.tier, shape.heads, shape.dim, shape.rope.dims // 2, shape.budget,
            shape.rope.pairs == "neighbours", shape.pool,
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, gates: Tensor, batch: KernelBatch, pages: Tensor) -> SelectedKeys:
        chosen = _empty(self._shape, gates)
        view = self._ops.view_of(batch, pages)
        self._index.choose(view, q, k, gates, *self._weights, pages, *chosen, self._shape.eps)
        return chosen


class CpuPooledIndex:
    """`PooledIndex`: torch makes keys of pools, of which a step has few."""

    def __init__(self, ops: Views, shape: Index, weights: KeyPoolWeights) -> None:
        self._ops, self._shape, self._weights = ops, shape, weights
        self._index = _core.TokenIndex(
            ops.pool, ops.tier, shape.heads, shape.dim, 0, shape.budget, neighbours=False, tokens=shape.pool
        )

    def __call__(
        self, q: Tensor, raw_keys: Tensor, gates: Tensor, step: StepContext, cache: PooledKeys
    ) -> SelectedKeys:
        s, w = self._shape, self._weights
        close_pools(raw_keys, step.rows, cache, s, w)
        chosen, no_rotation = _empty(s, gates), gates.new_empty((1, 0))
        view = self._ops.view_of(step.batch, cache.tokens)
        self._index.choose(view, q, None, gates, w.norm, w.bias, no_rotation, no_rotation, cache.keys, *chosen, s.eps)
        return chosen


def _empty(shape: Index, gates: Tensor) -> SelectedKeys:
    return SelectedKeys(
        *(gates.new_empty(size, dtype=torch.int32) for size in ((len(gates), shape.most), (len(gates),)))
    )


class CpuChosenAttention:
    """`AttendChosen`."""

    def __init__(self, ops: Views) -> None:
        self._ops, self._attention = ops, _core.ChosenAttention(ops.pool, ops.tier)

    def __call__(self, q: Tensor, pages: Tensor, batch: KernelBatch, scale: float, chosen: SelectedKeys) -> Tensor:
        rows, heads, head_dim = q.shape
        out, view = q.new_empty((rows, heads * head_dim)), self._ops.view_of(batch, pages)
        self._attention.attend(view, q, pages, chosen.rows, chosen.counts, out, scale)
        return out


def bound(ops: Views, shape: Index, weights: IndexWeights | KeyPoolWeights) -> TokenIndex | PooledIndex:
    if isinstance(weights, KeyPoolWeights):
        return CpuPooledIndex(ops, shape, weights)
    return CpuTokenIndex(ops, shape, weights)
