"""Latent attention on the C++ core."""

from __future__ import annotations

from tandem.kernels.cpu_ops import CpuOps
from tandem.mechanisms.latent.absorbed import AbsorbedHeads, LatentSizes, LatentWeights
from tandem.mechanisms.token_index.cpu import CpuChosenAttention


def bound(ops: CpuOps, sizes: LatentSizes, weights: LatentWeights, fmt: str = "bf16") -> AbsorbedHeads:
    """Packs `weights.keys` and `weights.values` once. They are not kept."""
    return AbsorbedHeads(ops, CpuChosenAttention(ops), sizes, weights, fmt)
