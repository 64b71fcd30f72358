"""What state spaces compute around their recurrence, on a GPU (or interpreted), against float64.

Numbers of bfloat16 are rounded once where the result is: 2^-8, relative. Sums of a row have 2^-24 a term; products in
three parts of tf32 lack 2^-20, three times in a row.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from tandem.mechanisms.state_space.torch import SpaceInputs, SpaceWeights, TorchSpaceStateUpdates
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState

if AVAILABLE:
    from tandem.mechanisms.state_space.gpu import GpuSpaceStateUpdates

pytestmark = [pytest.mark.gpu, needs_triton]
SLOTS, LENGTH = 4, 75
Shape = tuple[int, int, int, int]  # heads, groups, keys, values
AWKWARD = (6, 2, 12, 21)
SHAPES = [AWKWARD] if INTERPRETED else [AWKWARD, (64, 8, 128, 64), (128, 1, 128, 64)]  # Nemotron-3-Nano, Granite-4.0-H


def step_of(pieces: list[tuple[int, int, int]], single: int = 0, device: torch.device = DEVICE) -> ForwardState:
    """(slot, first position, rows) of each sequence."""
    rows = [count for _, _, count in pieces]
    positions = torch.cat([torch.arange(first, first + count) for _, first, count in pieces]).to(device)
    batch = ForwardBatch(
        positions, positions, positions, torch.tensor([0, *rows]).cumsum(0).int().to(device),
        torch.tensor([first + count for _, first, count in pieces]).int().to(device),
        torch.zeros(len(pieces), 1, device=device).int(), positions[:1],
        torch.tensor([slot for slot, _, _ in pieces]).int().to(device), single,
    )  # fmt: skip
    return ForwardState(batch, torch.empty(0))


class Case:
    """Sequences in slots. Gate and steps are parts of one array, as projections make them."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        heads, groups, keys, width = shape
        g, self.inner = torch.Generator().manual_seed(3), heads * width
        self.mixed = torch.randn(SLOTS, LENGTH, self.inner + 2 * groups * keys, generator=g)
        self.made = torch.randn(SLOTS, LENGTH, self.inner + 5 + heads, generator=g).mul(3.0).to(dtype)
        norm, through = torch.rand(self.inner, generator=g) + 0.5, torch.randn(heads, generator=g)
        decay, bias = -torch.logspace(-2, 1.2, heads), torch.linspace(-30.0, 30.0, heads)
        self.weights = SpaceWeights(decay, bias, through, norm, groups, 1e-5)
        self.memory = torch.full((SLOTS, heads, keys, width), float("nan"), device=DEVICE)
        self.tolerance = 2.0**-8 if dtype == torch.bfloat16 else 8 * (keys + LENGTH) * 2.0**-24
        self.tolerance += 0 if INTERPRETED else 3 * 2.0**-20

    def given(self, mixed: Tensor, made: Tensor) -> SpaceInputs:
        return SpaceInputs(mixed, made[:, : self.inner], made[:, self.inner + 5 :])

    def run(self, parts: list[tuple[int, int, int]], single: int = 0) -> list[Tensor]:
        given = self.given(
            *(
                torch.cat([x[slot, first : first + count] for slot, first, count in parts]).to(DEVICE)
                for x in (self.mixed, self.made)
            )
        )
        weights = SpaceWeights(*(each.to(DEVICE) for each in self.weights[:4]), *self.weights[4:])
        found = GpuSpaceStateUpdates().spaced(given, step_of(parts, single), self.memory, weights)
        return list(found.cpu().split([count for _, _, count in parts]))

    def check(self, slot: int, found: Tensor) -> None:
        length, memory = len(found), torch.zeros(2, *self.memory.shape[1:], dtype=torch.float64)
        weights = SpaceWeights(*(each.double() for each in self.weights[:4]), *self.weights[4:])
        given = self.given(*(x[slot, :length].double() for x in (self.mixed, self.made)))
        wanted = TorchSpaceStateUpdates().spaced(
            given, step_of([(1, 0, length)], device=torch.device("cpu")), memory, weights
        )
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert error <= self.tolerance, f"{error:.2e} of {self.tolerance:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_and_rows_that_decode_give_what_float64_gives(shape: Shape, dtype: torch.dtype) -> None:
    case = Case(shape, dtype)
    first, *_ = case.run([(3, 0, 70)])
    one, beside = case.run([(3, 70, 1), (1, 0, 75)], single=1)
    two, other = case.run([(3, 71, 1), (2, 0, 1)], single=2)
    case.check(3, torch.cat([first, one, two]))
    case.check(1, beside)
    case.check(2, other)
    assert case.memory[0].isnan().all()


@pytest.mark.parametrize("real", [1, 2])
def test_copies_give_what_the_last_real_row_gives(real: int) -> None:
    """Rows that fill up a graph."""
    case = Case(AWKWARD, torch.float32)
    case.memory.fill_(0.5)
    parts = [(2, 4, 1), (1, 9, 1)][:real]
    slot, first, _ = parts[-1]
    for each in (case.mixed, case.made):
        each[0, first] = each[slot, first]
    found = case.run([*parts, *[(0, first, 1)] * (3 - real)])
    assert all(row.equal(found[real - 1]) for row in found[real:])
    assert real == 1 or not found[0].equal(found[1])
