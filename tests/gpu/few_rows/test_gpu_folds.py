"""Rows that fill up a graph, beside memories of constant size on a GPU: they give what the last real row gives."""

from __future__ import annotations

import pytest
import torch

from gpu import DEVICE, needs_triton
from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState

pytestmark = [pytest.mark.gpu, needs_triton]
HEADS, GROUPS, KEYS, VALUES = 4, 2, 16, 16


@pytest.mark.parametrize("real", [1, 2])
def test_copies_give_what_the_last_real_row_gives(real: int) -> None:
    """Or they would write other keys and values to its places."""
    torch.manual_seed(1)
    slots = torch.tensor([2, 1][:real] + [0] * (3 - real), dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([4, 9][:real] + [[4, 9][real - 1]] * (3 - real), dtype=torch.int32, device=DEVICE)
    where = lens.long() - 1
    batch = ForwardBatch(
        where, where, where, torch.arange(4, dtype=torch.int32, device=DEVICE), lens,
        torch.zeros(3, 1, dtype=torch.int32, device=DEVICE), torch.arange(3, device=DEVICE), slots,
    )  # fmt: skip

    def rows(*size: int) -> torch.Tensor:
        return torch.randn(3, *size, device=DEVICE)[torch.arange(3).clamp(max=real - 1)]

    tokens = RecurrentTokens(rows(GROUPS, KEYS), rows(GROUPS, KEYS), rows(HEADS, VALUES), -rows(HEADS, 1).abs(), None)
    out = GpuStateUpdates().folded(
        tokens, ForwardState(batch, torch.empty(0)), torch.randn(3, HEADS, KEYS, VALUES, device=DEVICE)
    )
    assert all(out[row].equal(out[real - 1]) for row in range(real, 3))
    assert real == 1 or not out[0].equal(out[1])
