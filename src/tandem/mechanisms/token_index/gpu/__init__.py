"""Choosing tokens on a GPU."""

from __future__ import annotations

from tandem.errors import KernelError
from tandem.mechanisms.token_index.gpu.index import GpuTokenIndex
from tandem.mechanisms.token_index.pooled import KeyPoolWeights
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights


def bound(ops: object, shape: Index, weights: IndexWeights | KeyPoolWeights) -> GpuTokenIndex:
    if isinstance(weights, KeyPoolWeights):
        raise KernelError("there are no GPU kernels for keys that stand for several tokens")
    return GpuTokenIndex(shape, weights)
