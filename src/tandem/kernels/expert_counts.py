"""Counts of chosen experts."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.ops import ExpertCounts


def count_choices(tally: ExpertCounts, ids: Tensor) -> None:
    """ids [T, k] of routed experts. Nothing here waits for a GPU."""
    flat, kind = ids.flatten().long(), tally.tokens.dtype
    counts = torch.ones_like(flat, dtype=kind)
    if tally.rows is not None:
        counts = (torch.arange(len(ids), device=ids.device) < tally.rows).repeat_interleave(ids.shape[1])
    tally.tokens.scatter_add_(0, flat, counts.to(kind))
    tally.used.scatter_reduce_(0, flat, counts.to(kind), "amax")
    if tally.chosen is not None:
        tally.chosen[: len(ids)].copy_(ids)
