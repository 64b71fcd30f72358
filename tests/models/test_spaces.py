"""State spaces between their projections, against float64, at every cut.

Numbers of bfloat16 are rounded once where the result is: 2^-8, relative. Sums of a row have 2^-24 a term.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from folded_steps import TIERS, folds_of, step_of
from tandem.errors import KernelError
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.mechanisms.state_space.torch import SpaceInputs, SpaceWeights, TorchSpaceStateUpdates
from tandem.spec.norm import Norm

HEADS, GROUPS, KEYS, VALUES, LENGTH, SLOTS = 6, 2, 12, 21, 75, 4
INNER, CHANNELS = HEADS * VALUES, HEADS * VALUES + 2 * GROUPS * KEYS
SHAPE = StateSpace(HEADS, VALUES, GROUPS, KEYS, 4, Norm(1e-5))
CUTS = [[75], [1, 2, 72], [64, 11], [3] * 25]


class Case:
    """Two sequences. Gate and steps are parts of one array, as projections make them."""

    def __init__(self, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(3)
        self.mixed = torch.randn(2, LENGTH, CHANNELS, generator=g)
        self.made = torch.randn(2, LENGTH, INNER + 5 + HEADS, generator=g).mul(3.0).to(dtype)
        norm = torch.rand(INNER, generator=g) + 0.5
        decay, bias, through = -torch.logspace(-2, 1.2, HEADS), torch.linspace(-30.0, 30.0, HEADS), torch.randn(HEADS)
        self.weights = SpaceWeights(decay, bias, through, norm, GROUPS, 1e-5)

    def given(self, rows: slice) -> SpaceInputs:
        """Of both, one after the other."""
        mixed, made = (torch.cat(list(each[:, rows])) for each in (self.mixed, self.made))
        return SpaceInputs(mixed, made[:, :INNER], made[:, INNER + 5 :])

    def exact(self, which: int) -> Tensor:
        """Of one sequence from nothing."""
        wide = SpaceWeights(*(each.double() for each in self.weights[:4]), *self.weights[4:])
        made, memory = self.made[which].double(), torch.zeros(SLOTS, HEADS, KEYS, VALUES, dtype=torch.float64)
        given = SpaceInputs(self.mixed[which].double(), made[:, :INNER], made[:, INNER + 5 :])
        return TorchSpaceStateUpdates().spaced(given, step_of([(1, 0, LENGTH)]), memory, wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_every_cut_gives_what_float64_gives(tier: str, cuts: list[int], dtype: torch.dtype) -> None:
    """Both sequences in one step; slots hold another's numbers before."""
    case, folds, at, found = Case(dtype), folds_of(tier, SHAPE), 0, [list[Tensor](), list[Tensor]()]
    memory = torch.randn(SLOTS, HEADS, KEYS, VALUES)
    for count in cuts:
        given = case.given(slice(at, at + count))
        seen = folds.spaced(given, step_of([(3, at, count), (1, at, count)]), memory, case.weights)
        assert seen.dtype == dtype
        for kept, part in zip(found, seen.split(count), strict=True):
            kept.append(part)
        at += count
    for which, kept in enumerate(found):
        wanted = case.exact(which)
        error = float((torch.cat(kept).double() - wanted).norm() / wanted.norm())
        assert error <= (2.0**-8 if dtype == torch.bfloat16 else 8 * (KEYS + LENGTH) * 2.0**-24)


def test_what_does_not_fit_is_refused() -> None:
    """By the core, before anything is written."""
    case, folds, memory = Case(torch.float32), folds_of("scalar", SHAPE), torch.zeros(SLOTS, HEADS, KEYS, VALUES)
    given, pieces = case.given(slice(None)), [(1, 0, LENGTH), (2, 0, LENGTH)]
    with pytest.raises(ValueError, match="state_space: a slot is not there"):
        folds.spaced(given, step_of([(1, 0, LENGTH), (SLOTS, 0, LENGTH)]), memory, case.weights)
    with pytest.raises(KernelError, match="mixed"):
        folds.spaced(given._replace(mixed=given.mixed[:, 1:].contiguous()), step_of(pieces), memory, case.weights)
    with pytest.raises(KernelError, match="do not share what is written evenly"):
        folds.spaced(given, step_of(pieces), memory, case.weights._replace(groups=4))
    step = step_of(pieces)
    step.batch.state_lens, step.batch.num_verified = torch.zeros(2).int(), torch.full((2,), LENGTH - 1).int()
    with pytest.raises(ValueError, match="state_space: a memory cannot take draft tokens back"):
        folds.spaced(given, step, memory, case.weights)
    assert memory.eq(0).all()
