"""Convolutions over the last tokens on a GPU (or interpreted) against sums in float64, rounded where PyTorch rounds.

The sum of five terms in float32 is wrong by 2^-22 of what it would be if none cancelled another. It is rounded to the
rows' type, where it may lie between two numbers: 2^-8 of it in bfloat16, 2^-24 in float32. Then it passes silu, whose
slope is at most 1.1, or is multiplied with a gate; and is rounded again.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from tandem.mechanisms.recurrence.torch import Taps, TorchStateUpdates, taps_of
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState

if AVAILABLE:
    from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates

pytestmark = [pytest.mark.gpu, needs_triton]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
SLOTS, TAPS, CHANNELS, DRAFT_TOKENS, LENGTH = 6, 4, 300, 2, 100
Part = tuple[int, int, int]  # slot, tokens before, new rows


def step_of(parts: list[Part], single: int = 0, device: torch.device = DEVICE) -> ForwardState:
    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    starts = torch.tensor([0, *(new for _, _, new in parts)]).cumsum(0).tolist()
    where = torch.cat([torch.arange(before, before + new) for _, before, new in parts]).to(device)
    batch = ForwardBatch(
        where, where, where, ints(starts), ints([before + new for _, before, new in parts]),
        torch.zeros(len(parts), 1, dtype=torch.int32, device=device), where[:1], ints([slot for slot, _, _ in parts]),
        single,
    )  # fmt: skip
    return ForwardState(batch, torch.empty(0))


class Case:
    """Rows of each slot, columns of a wider matrix; rings hold NaN where no token was."""

    def __init__(self, gated: bool, biased: bool) -> None:
        g, self.gated, self.width = torch.Generator().manual_seed(5), gated, CHANNELS * (3 if gated else 1)
        conv, bias = torch.randn(CHANNELS, TAPS, generator=g), torch.randn(CHANNELS, generator=g) if biased else None
        self.taps = taps_of(conv, bias)
        self.there = Taps(self.taps.rows.to(DEVICE), biased)
        self.rows = torch.randn(SLOTS, LENGTH, self.width, generator=g).to(DTYPE)
        whole = torch.full((SLOTS, (TAPS + DRAFT_TOKENS) * CHANNELS + 16), float("nan"), dtype=DTYPE, device=DEVICE)
        self.ring = whole[:, 16:].view(SLOTS, TAPS + DRAFT_TOKENS, CHANNELS)

    def run(self, parts: list[Part], single: int = 0, wrong: Tensor | None = None) -> list[Tensor]:
        """What each part gives. wrong: rows that the last ones are in place of."""
        new = torch.cat([self.rows[slot, before : before + count] for slot, before, count in parts])
        if wrong is not None:
            new[-len(wrong) :] = wrong
        wide = torch.cat([torch.zeros(len(new), 8, dtype=DTYPE), new], 1).to(DEVICE)[:, 8:]
        folds = GpuStateUpdates()
        call = folds.gated if self.gated else folds.convolved
        found = call(wide, step_of(parts, single), self.ring, self.there)
        return list(found.cpu().split([count for _, _, count in parts]))

    def exact(self, slot: int) -> tuple[Tensor, Tensor]:
        """What each row gives, and by how much it may be wrong."""
        x, unit = self.rows[slot], 2.0**-24 if INTERPRETED else 2.0**-8
        if self.gated:
            before, behind, x = x.chunk(3, dim=1)
            x = before * x
        padded = torch.cat([torch.zeros(TAPS - 1, CHANNELS), x.float()]).double()
        terms = torch.stack([padded[i : i + LENGTH] * self.taps.weights[i].double() for i in range(TAPS)])
        if self.taps.bias is not None:
            terms = torch.cat([terms, self.taps.bias.double().expand(1, LENGTH, -1)])
        mixed = terms.sum(0).to(DTYPE)
        wanted = (behind * mixed if self.gated else F.silu(mixed)).double()
        slope = behind.abs().double() if self.gated else 1.1
        return wanted, slope * (2.0**-22 * terms.abs().sum(0) + unit * mixed.abs()) + unit * wanted.abs()

    def check(self, slot: int, found: Tensor, first: int = 0) -> None:
        wanted, tolerance = (each[first : first + len(found)] for each in self.exact(slot))
        assert ((found.double() - wanted).abs() <= tolerance).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("cuts", [[100], [1, 2, 97], [33, 32, 35], [3] * 9], ids=str)
def test_every_cut_gives_what_float64_gives(cuts: list[int], gated: bool, biased: bool) -> None:
    """Two prompts, and before them a sequence that decodes."""
    case, at = Case(gated, biased), 0
    for index, count in enumerate(cuts):
        alone, *prompts = case.run([(1, index, 1), (4, at, count), (2, at, count)], single=1)
        case.check(1, alone, index)
        for slot, found in zip((4, 2), prompts, strict=True):
            case.check(slot, found, at)
        at += count
    assert case.ring[[0, 3]].isnan().all()


@pytest.mark.parametrize("gated", [False, True])
def test_drafts_see_each_other_and_leave_nothing(gated: bool) -> None:
    """As sequences of their own; wrong ones are computed again. A row that decodes beside a prompt has its bits."""
    case = Case(gated, True)
    case.check(2, case.run([(2, 0, 3)])[0])
    wrong = torch.randn(DRAFT_TOKENS, case.width, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    for at in range(3, 19, 2):
        parts = [(2, at, 1), (2, at + 1, 1), (2, at + 2, 1)]
        case.check(2, case.run(parts, wrong=wrong)[0], at)
        for index, found in enumerate(case.run(parts)):
            case.check(2, found, at + index)
    kept = case.ring.clone()
    alone = case.run([(2, 21, 1)])[0]
    case.ring.copy_(kept)
    assert case.run([(2, 21, 1), (3, 0, 40)], single=1)[0].equal(alone)


@pytest.mark.parametrize("real", [1, 2])
def test_copies_that_fill_up_a_graph_give_what_the_last_real_row_gives(real: int) -> None:
    case = Case(False, False)
    case.run([(3, 0, 7), (2, 0, 9)])
    parts = [(3, 7, 1), (2, 9, 1)][:real]
    copies = [(0, parts[-1][1], 1)] * (4 - real)
    case.rows[0] = case.rows[parts[-1][0]]
    found = case.run([*parts, *copies])
    for slot, row in zip((3, 2), found[:real], strict=False):
        case.check(slot, row, 7 if slot == 3 else 9)
    assert all(row.equal(found[real - 1]) for row in found[real:]) and case.ring[0].isnan().all()


def test_the_ring_is_pytorchs() -> None:
    """So that a sequence may go on elsewhere."""
    case, cpu = Case(False, True), TorchStateUpdates()
    ring = torch.zeros(case.ring.shape, dtype=DTYPE)
    for parts in ([(1, 0, 5), (3, 0, 50)], [(1, 5, 1), (3, 50, 1)], [(1, 6, 2), (3, 51, 9)]):
        case.run(parts)
        rows = torch.cat([case.rows[slot, before : before + count] for slot, before, count in parts])
        cpu.convolved(rows, step_of(parts, device=torch.device("cpu")), ring, case.taps)
    assert case.ring[[1, 3]].cpu().equal(ring[[1, 3]])
