"""Latent attention on a GPU."""

from __future__ import annotations

from tandem.kernels.gpu.linear import dtype_of
from tandem.kernels.gpu.ops import GpuOps
from tandem.mechanisms.latent.absorbed import LatentSizes, LatentWeights
from tandem.mechanisms.latent.gpu.heads import GpuLatentHeads


def bound(ops: GpuOps, sizes: LatentSizes, weights: LatentWeights, fmt: str = "bf16") -> GpuLatentHeads:
    return GpuLatentHeads(sizes, weights, dtype_of(fmt), ops.device, ops.fixed)
