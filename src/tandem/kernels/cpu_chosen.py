"""Choosing tokens, and attention over them, on the C++ core."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tandem import _core
from tandem.config.mechanisms.latent import Index
from tandem.kernels.batch_layout import BatchLayout
from tandem.kernels.token_index import Chosen, IndexWeights


class Views(Protocol):
    """What is shared with a step's other operations."""

    pool: _core.WorkerPool
    tier: str

    def view_of(self, batch: BatchLayout, pages: Tensor) -> _core.BatchView:
        """The step's checked indices."""
        ...


class CpuTokenIndex:
    """`TokenIndex`."""

    def __init__(self, ops: Views, shape: Index, weights: IndexWeights) -> None:
        self._ops, self._shape, self._weights = ops, shape, weights
        self._index = _core.TokenIndex(
            ops.pool, ops.tier, shape.heads, shape.dim, shape.rope.dims // 2, shape.budget,
            shape.rope.pairs == "neighbours",
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, gates: Tensor, batch: BatchLayout, pages: Tensor) -> Chosen:
        view = self._ops.view_of(batch, pages)
        sizes = (len(q), self._shape.budget), (len(q),)
        chosen = Chosen(*(gates.new_empty(size, dtype=torch.int32) for size in sizes))
        self._index.choose(view, q, k, gates, *self._weights, pages, *chosen, self._shape.eps)
        return chosen


class CpuChosenAttention:
    """`AttendChosen`."""

    def __init__(self, ops: Views) -> None:
        self._ops, self._attention = ops, _core.ChosenAttention(ops.pool, ops.tier)

    def __call__(self, q: Tensor, pages: Tensor, batch: BatchLayout, scale: float, chosen: Chosen) -> Tensor:
        rows, heads, head_dim = q.shape
        out, view = q.new_empty((rows, heads * head_dim)), self._ops.view_of(batch, pages)
        self._attention.attend(view, q, pages, chosen.rows, out, scale)
        return out
