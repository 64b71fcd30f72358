"""Memories of recurrent layers in tests: whose kernels fold, and steps of pieces of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.channel_delta.torch import ChannelState
from tandem.models import ForwardBatch
from tandem.models.passing import ForwardState

TIERS = ("torch", *_core.supported_tiers())


def folds_of(tier: str, shape: object) -> Any:
    """The operator that computes a recurrence of this shape."""
    return (TorchOps() if tier == "torch" else CpuOps(_core.WorkerPool([-1, -1]), tier)).bound(shape)


def step_of(pieces: list[tuple[int, int, int]]) -> ForwardState:
    """(slot, first position, rows) of each sequence."""
    rows = [count for _, _, count in pieces]
    positions = torch.cat([torch.arange(first, first + count) for _, first, count in pieces])
    batch = ForwardBatch(
        positions, positions, positions, torch.tensor([0, *rows]).cumsum(0).int(),
        torch.tensor([first + count for _, first, count in pieces]).int(), torch.zeros(len(pieces), 1).int(),
        torch.arange(sum(rows)), torch.tensor([slot for slot, _, _ in pieces]).int(),
    )  # fmt: skip
    return ForwardState(batch, torch.empty(0))


def channel_state(memory: Tensor, dtype: torch.dtype, places: int = 0) -> ChannelState:
    """Memories [slots, H, D, D] of delta nets whose channels decay apart, with places for draft tokens that hold
    nothing."""
    slots, heads, dim = memory.shape[:3]
    mixed = torch.full((slots, places, 3 * heads * dim), torch.nan, dtype=memory.dtype, device=memory.device)
    forget, beta = (mixed.new_full((slots, places, n), torch.nan).to(dtype) for n in (heads * dim, heads))
    return ChannelState(mixed, forget, beta, memory)
