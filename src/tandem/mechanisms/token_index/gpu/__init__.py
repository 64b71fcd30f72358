"""Choosing tokens on a GPU."""

from __future__ import annotations

from tandem.errors import KernelError
from tandem.mechanisms.token_index.gpu.index import GpuTokenIndex
from tandem.mechanisms.token_index.pooled import PoolWeights
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights


def bound(ops: object, shape: Index, weights: IndexWeights | PoolWeights) -> GpuTokenIndex:
    if isinstance(weights, PoolWeights):
        raise KernelError("there are no GPU kernels for keys that stand for several tokens")
    return GpuTokenIndex(shape, weights)
