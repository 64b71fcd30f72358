"""Shared keys on a GPU."""

from __future__ import annotations

from tandem.kernels.gpu.linear import dtype_of
from tandem.kernels.gpu.ops import GpuOps
from tandem.mechanisms.compressed_attention.gpu.heads import GpuCompressedHeads
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.compressed_attention.weights import CompressedWeights


def bound(ops: GpuOps, shape: CompressedAttention, weights: CompressedWeights, fmt: str = "bf16") -> GpuCompressedHeads:
    return GpuCompressedHeads(shape, weights, weights.groups.to(ops.device, dtype_of(fmt)).contiguous())
