"""Latent attention in plain torch."""

from __future__ import annotations

from tandem.mechanisms.latent.absorbed import AbsorbedHeads, HeadOps, LatentSizes, LatentWeights
from tandem.mechanisms.token_index.torch import attend_chosen


def bound(ops: HeadOps, sizes: LatentSizes, weights: LatentWeights, fmt: str = "bf16") -> AbsorbedHeads:
    """Packs `weights.keys` and `weights.values` once. They are not kept."""
    return AbsorbedHeads(ops, attend_chosen, sizes, weights, fmt)
