"""Choosing tokens on a GPU."""

from __future__ import annotations

from tandem.mechanisms.token_index.gpu.index import GpuTokenIndex
from tandem.mechanisms.token_index.gpu.pooled import GpuPooledIndex
from tandem.mechanisms.token_index.pooled import KeyPoolWeights
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights


def bound(ops: object, shape: Index, weights: IndexWeights | KeyPoolWeights) -> GpuTokenIndex | GpuPooledIndex:
    if isinstance(weights, KeyPoolWeights):
        return GpuPooledIndex(shape, weights)
    return GpuTokenIndex(shape, weights)
