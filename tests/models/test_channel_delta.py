"""Delta nets whose channels decay apart, between their projections, against float64, at every cut.

Numbers of bfloat16 are rounded once where beta and the result are, and where the memory's answer is before its norm:
2^-8 each, relative. Sums of a row have 2^-24 a term.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from folded_steps import TIERS, channel_state, folds_of, step_of
from tandem.errors import KernelError
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.channel_delta.torch import (
    ChannelGates,
    ChannelStateUpdates,
    ChannelWeights,
    TorchChannelStateUpdates,
)
from tandem.spec.norm import Norm

HEADS, DIM, LENGTH, SLOTS = 3, 20, 75, 4
INNER = HEADS * DIM
SHAPE = ChannelDelta(HEADS, DIM, 4, Norm(1e-5))
CUTS = [[75], [1, 2, 72], [64, 11], [3] * 25]


class Case:
    """Two sequences. Some channels keep nearly all, others nothing, or what a floor leaves them."""

    def __init__(self, dtype: torch.dtype, floor: float = 0.0) -> None:
        g = torch.Generator().manual_seed(3)
        self.mixed = torch.randn(2, LENGTH, 3 * INNER, generator=g)
        self.mixed[:, 7, :INNER] = 0.0  # a query without a direction
        self.forget, self.behind = torch.randn(2, 2, LENGTH, INNER, generator=g).mul(3.0).to(dtype).unbind()
        self.beta = torch.randn(2, LENGTH, HEADS + 5, generator=g).to(dtype)[..., 5:]
        bias, norm = torch.linspace(-30.0, 30.0, INNER), torch.rand(DIM, generator=g) + 0.5
        self.weights = ChannelWeights(-torch.tensor([0.01, 1.0, 16.0]), bias, norm, 1e-5, floor)

    def gates(self, which: int, rows: slice) -> ChannelGates:
        return ChannelGates(*(each[which, rows] for each in (self.forget, self.beta, self.behind)))

    def exact(self, which: int) -> Tensor:
        """Of one sequence from nothing."""
        wide = ChannelWeights(*(each.double() for each in self.weights[:3]), *self.weights[3:])
        gates, memory = self.gates(which, slice(None)), torch.zeros(SLOTS, HEADS, DIM, DIM, dtype=torch.float64)
        wider = ChannelGates(*(each.double() for each in gates))
        return TorchChannelStateUpdates().corrected(
            self.mixed[which].double(), wider, step_of([(1, 0, LENGTH)]), channel_state(memory, memory.dtype), wide
        )


@pytest.mark.parametrize("floor", [0.0, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_every_cut_gives_what_float64_gives(tier: str, cuts: list[int], dtype: torch.dtype, floor: float) -> None:
    """Both sequences in one step; slots hold another's numbers before."""
    case, folds, at, found = Case(dtype, floor), folds_of(tier, SHAPE), 0, [list[Tensor](), list[Tensor]()]
    state = channel_state(torch.randn(SLOTS, HEADS, DIM, DIM), dtype)
    for count in cuts:
        rows = slice(at, at + count)
        gates = ChannelGates(*map(torch.cat, zip(*(case.gates(which, rows) for which in range(2)), strict=True)))
        mixed = torch.cat([case.mixed[which, rows] for which in range(2)])
        if count == LENGTH:  # as a split of another array, whose rows lie apart
            gates = gates._replace(beta=torch.cat([gates.beta, gates.beta], 1)[:, HEADS:])
        seen = folds.corrected(mixed, gates, step_of([(3, at, count), (1, at, count)]), state, case.weights)
        assert seen.dtype == dtype
        for kept, part in zip(found, seen.split(count), strict=True):
            kept.append(part)
        at += count
    for which, kept in enumerate(found):
        wanted = case.exact(which)
        error = float((torch.cat(kept).double() - wanted).norm() / wanted.norm())
        assert error <= (3 * 2.0**-8 if dtype == torch.bfloat16 else 8 * (DIM + LENGTH) * 2.0**-24)


def test_a_floor_is_the_least_that_a_decay_becomes() -> None:
    """Whatever is asked, a memory keeps e^floor of itself in a step; without a floor nothing may be left."""
    for floor, least in ((0.0, 0.0), (-1.5, 0.2231)):
        case, folds = Case(torch.float32, floor), folds_of(TIERS[-1], SHAPE)
        forget, beta = torch.full((1, INNER), 1e4), torch.full((1, HEADS), -1e4)
        gates = case.gates(0, slice(0, 1))._replace(forget=forget, beta=beta)
        memory = torch.ones(SLOTS, HEADS, DIM, DIM)
        state = channel_state(memory, torch.float32)
        folds.corrected(case.mixed[0, :1], gates, step_of([(1, 5, 1)]), state, case.weights)
        assert torch.allclose(memory[1, -1], torch.tensor(least), atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    """By the core, before anything is written."""
    case, folds, memory = Case(torch.float32), folds_of("scalar", SHAPE), torch.zeros(SLOTS, HEADS, DIM, DIM)
    gates, mixed, state = case.gates(0, slice(None)), case.mixed[0], channel_state(memory, torch.float32, 2)
    with pytest.raises(ValueError, match="channel_delta: a slot is not there"):
        folds.corrected(mixed, gates, step_of([(SLOTS, 0, LENGTH)]), state, case.weights)
    with pytest.raises(KernelError, match="mixed"):
        folds.corrected(mixed[:, 1:].contiguous(), gates, step_of([(1, 0, LENGTH)]), state, case.weights)
    step = step_of([(1, 0, LENGTH)])
    step.batch.state_lens, step.batch.num_verified = torch.zeros(1).int(), torch.full((1,), LENGTH - 3).int()
    with pytest.raises(ValueError, match="channel_delta: there are too few places for the inputs of draft tokens"):
        folds.corrected(mixed, gates, step, state, case.weights)
    with pytest.raises(ValueError, match="channel_delta: decays' floor must be 0 or below"):
        folds.corrected(mixed, gates, step_of([(1, 0, LENGTH)]), state, case.weights._replace(floor=1.0))
    assert memory.eq(0).all()


STEPS = [(40, 40), (4, 1), (3, 1), (1, 1), (4, 2), (2, 1), (5, 5)]
"""Rows of each step, and how many of them are no draft tokens."""


@pytest.mark.parametrize("right", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_drafts_are_taken_back_or_done_again(tier: str, dtype: torch.dtype, right: int) -> None:
    """At most `right` draft tokens of a step are accepted. All rows answer as those of a text that had them from the
    start: with the same bits on the core, after the same operations on the same numbers. Wrong ones are of another
    text."""
    case, folds = Case(dtype, -5.0), folds_of(tier, SHAPE)
    state = channel_state(torch.randn(SLOTS, HEADS, DIM, DIM), dtype, places=6)
    known, folded = 0, 0
    for count, num_verified in STEPS:
        came = min(count, num_verified + right)
        tries = [(0, slice(known, known + came)), (1, slice(known + came, known + count))]
        gates = ChannelGates(*map(torch.cat, zip(*(case.gates(*each) for each in tries), strict=True)))
        mixed, step = torch.cat([case.mixed[each] for each in tries]), step_of([(2, known, count)])
        batch = step.batch
        batch.state_lens, batch.num_verified = (torch.tensor([n]).int() for n in (folded, num_verified))
        answers = folds.corrected(mixed, gates, step, state, case.weights)
        wanted = _at_once(folds, case, dtype, (known, came, count))
        error = float((answers - wanted).double().norm() / wanted.double().norm())
        assert error <= (8 * (DIM + LENGTH) * 2.0**-24 if tier == "torch" else 0)
        folded, known = known + num_verified, known + came


def _at_once(folds: ChannelStateUpdates, case: Case, dtype: torch.dtype, lengths: tuple[int, int, int]) -> Tensor:
    """Rows [known, known + count) of a text: the first's up to token known + came, then the second's."""
    known, came, count = lengths
    texts = [(0, slice(0, known + came)), (1, slice(known + came, known + count))]
    gates = ChannelGates(*map(torch.cat, zip(*(case.gates(*each) for each in texts), strict=True)))
    mixed = torch.cat([case.mixed[each] for each in texts])
    state = channel_state(torch.zeros(SLOTS, HEADS, DIM, DIM), dtype)
    return folds.corrected(mixed, gates, step_of([(1, 0, known + count)]), state, case.weights)[known:]
