"""N-grams of tokens on a GPU."""

from __future__ import annotations

from tandem.kernels.gpu.ops import GpuOps
from tandem.mechanisms.ngrams.gpu.block import GpuNgrams
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import NgramWeights


def bound(ops: GpuOps, shape: Ngram, weights: NgramWeights) -> GpuNgrams:
    ngrams = GpuNgrams(shape, weights, ops.device)
    ops.tables.append(ngrams.staged)
    return ngrams
