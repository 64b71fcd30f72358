"""Gates in plain torch: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import softplus

from tandem.kernels.gates import gated, in_whole_vectors

ROWS, WIDTH = 71, 60


@pytest.mark.parametrize("shape", [(1,), (5, 1), (5, 12)], ids=str)
def test_a_row_has_the_same_bits_alone(shape: tuple[int, ...]) -> None:
    """By a gate of the row, of each head, and of each number; unlike the sigmoid of all of them at once."""
    g = torch.Generator().manual_seed(1)
    x, gate = torch.randn(ROWS, WIDTH, generator=g), torch.randn(ROWS, *shape, generator=g) * 3
    together = gated(x, gate)
    assert torch.equal(together, torch.cat([gated(x[i : i + 1], gate[i : i + 1]) for i in range(ROWS)]))
    share = gate.double().sigmoid().flatten(1).repeat_interleave(WIDTH // gate[0].numel(), 1)
    assert torch.allclose(together.double(), x.double() * share, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [1, 5, 32, 70])
def test_functions_of_rows_of_any_width(width: int) -> None:
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(2))
    for of in (torch.sigmoid, softplus):
        together = in_whole_vectors(of, x)
        assert torch.equal(together, torch.cat([in_whole_vectors(of, row[None]) for row in x]))
        assert torch.allclose(together, of(x), rtol=1e-6)
