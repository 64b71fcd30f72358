"""Shared keys on a GPU."""

from __future__ import annotations

from tandem.kernels.gpu.linear import dtype_of
from tandem.kernels.gpu.ops import GpuOps
from tandem.mechanisms.shared_kv.gpu.heads import GpuSharedKvHeads
from tandem.mechanisms.shared_kv.shape import SharedKv
from tandem.mechanisms.shared_kv.weights import SharedKvWeights


def bound(ops: GpuOps, shape: SharedKv, weights: SharedKvWeights, fmt: str = "bf16") -> GpuSharedKvHeads:
    return GpuSharedKvHeads(shape, weights, weights.groups.to(ops.device, dtype_of(fmt)).contiguous())
