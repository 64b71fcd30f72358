"""Gated delta nets on a GPU."""

from __future__ import annotations

from tandem.kernels.gpu.ops import GpuOps
from tandem.mechanisms.delta_net.gpu.net import GpuDelta
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import DeltaWeights


def bound(ops: GpuOps, shape: DeltaRule, weights: DeltaWeights) -> GpuDelta:
    delta = GpuDelta(shape, weights)
    if ops.device.type == "cuda" and shape not in ops.warm:
        ops.warm.add(shape)
        delta.warm_up()
    return delta
