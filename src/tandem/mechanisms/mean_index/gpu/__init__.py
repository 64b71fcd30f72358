"""Choosing blocks of tokens on a GPU."""

from __future__ import annotations

from tandem.mechanisms.mean_index.gpu.index import GpuMeanIndex
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.mean_index.torch import MeanWeights


def bound(ops: object, shape: MeanIndex, weights: MeanWeights) -> GpuMeanIndex:
    return GpuMeanIndex(shape, weights)
