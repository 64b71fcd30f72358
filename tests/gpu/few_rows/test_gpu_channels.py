"""What delta nets whose channels decay apart compute around their recurrence, on a GPU (or interpreted), against
float64.

Numbers of bfloat16 are rounded once where beta and the result are, and where the memory's answer is before its norm:
2^-8 each, relative. Sums of a row have 2^-24 a term; products in three parts of tf32 lack 2^-20, three times in a row.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from folded_steps import channel_state
from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from tandem.mechanisms.channel_delta.torch import ChannelGates, ChannelWeights, TorchChannelStateUpdates
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState

if AVAILABLE:
    from tandem.mechanisms.channel_delta.gpu import GpuChannelStateUpdates

pytestmark = [pytest.mark.gpu, needs_triton]
SLOTS, LENGTH = 4, 75
SHAPES = [(3, 20)] if INTERPRETED else [(3, 20), (32, 128)]  # heads, channels of each; Kimi-Linear's


def step_of(
    pieces: list[tuple[int, int, int]], single: int = 0, device: torch.device = DEVICE, sure: list[int] | None = None
) -> ForwardState:
    """(slot, first position, rows) of each sequence. sure: tokens that each one's memory holds."""
    rows = [count for _, _, count in pieces]
    positions = torch.cat([torch.arange(first, first + count) for _, first, count in pieces]).to(device)
    batch = ForwardBatch(
        positions, positions, positions, torch.tensor([0, *rows]).cumsum(0).int().to(device),
        torch.tensor([first + count for _, first, count in pieces]).int().to(device),
        torch.zeros(len(pieces), 1, device=device).int(), positions[:1],
        torch.tensor([slot for slot, _, _ in pieces]).int().to(device), single,
        state_lens=None if sure is None else torch.tensor(sure).int().to(device),
    )  # fmt: skip
    return ForwardState(batch, torch.empty(0))


class Case:
    """Sequences in slots; some channels keep nearly all, others nothing."""

    def __init__(self, heads: int, dim: int, dtype: torch.dtype, floor: float = 0.0, draft_tokens: int = 0) -> None:
        g, inner = torch.Generator().manual_seed(3), heads * dim
        self.mixed = torch.randn(SLOTS, LENGTH, 3 * inner, generator=g)
        self.mixed[:, 7, :inner] = 0.0  # a query without a direction
        self.forget, self.behind = torch.randn(2, SLOTS, LENGTH, inner, generator=g).mul(3.0).to(dtype).unbind()
        self.beta = torch.randn(SLOTS, LENGTH, heads, generator=g).to(dtype)
        norm = torch.rand(dim, generator=g) + 0.5
        bias = torch.linspace(-30.0, 30.0, inner)
        self.weights = ChannelWeights(-torch.logspace(-2, 1.2, heads), bias, norm, 1e-5, floor)
        self.memory = torch.full((SLOTS, heads, dim, dim), float("nan"), device=DEVICE)
        self.state = channel_state(self.memory, dtype, 2 * draft_tokens)
        self.tolerance = 3 * 2.0**-8 if dtype == torch.bfloat16 else 8 * (dim + LENGTH) * 2.0**-24
        self.tolerance += 0 if INTERPRETED else 3 * 2.0**-20

    def run(
        self, parts: list[tuple[int, int, int]], single: int = 0, sure: list[int] | None = None, wrong: int = 0
    ) -> list[Tensor]:
        """wrong: so many last rows are of other tokens."""

        def rows(x: Tensor) -> Tensor:
            rows = torch.cat([x[slot, first : first + count] for slot, first, count in parts])
            return torch.cat((rows[: len(rows) - wrong], -rows[len(rows) - wrong :])).to(DEVICE)

        beta = torch.cat([rows(self.beta)] * 2, 1)[:, len(self.weights.decay) :]  # as a split of another array
        gates = ChannelGates(rows(self.forget), beta, rows(self.behind))
        weights = ChannelWeights(*(each.to(DEVICE) for each in self.weights[:3]), *self.weights[3:])
        found = GpuChannelStateUpdates().corrected(
            rows(self.mixed), gates, step_of(parts, single, sure=sure), self.state, weights
        )
        return list(found.cpu().split([count for _, _, count in parts]))

    def check(self, slot: int, found: Tensor) -> None:
        length, (heads, dim) = len(found), self.memory.shape[1:3]
        weights = ChannelWeights(*(each.double() for each in self.weights[:3]), *self.weights[3:])
        gates = ChannelGates(*(each[slot, :length].double() for each in (self.forget, self.beta, self.behind)))
        step, memory = step_of([(1, 0, length)], device=torch.device("cpu")), torch.zeros(2, heads, dim, dim).double()
        state = channel_state(memory, memory.dtype)
        wanted = TorchChannelStateUpdates().corrected(self.mixed[slot, :length].double(), gates, step, state, weights)
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert error <= self.tolerance, f"{error:.2e} of {self.tolerance:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("floor", [0.0, -5.0])
def test_prompts_and_rows_that_decode_give_what_float64_gives(
    shape: tuple[int, int], dtype: torch.dtype, floor: float
) -> None:
    case = Case(*shape, dtype, floor)
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
    case = Case(*SHAPES[0], torch.float32)
    case.memory.fill_(0.5)
    parts = [(2, 4, 1), (1, 9, 1)][:real]
    slot, first, _ = parts[-1]
    for each in (case.mixed, case.forget, case.beta, case.behind):
        each[0, first] = each[slot, first]
    found = case.run([*parts, *[(0, first, 1)] * (3 - real)])
    assert all(row.equal(found[real - 1]) for row in found[real:])
    assert real == 1 or not found[0].equal(found[1])


STEPS = [(3, 3), (3, 0), (0, 0), (3, 2), (2, 2), (1, 0), (0, 0), (3, 3), (3, 1), (1, 1)]
"""Draft tokens of a step, and how many of them are accepted."""


class Trial:
    """A prompt of 5 in slot 2, then steps with drafts behind a sequence in slot 1 that has none; copies fill up."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, floor: float) -> None:
        self.case = Case(*shape, dtype, floor, draft_tokens=3)
        mine, other = self.case.run([(2, 0, 5), (1, 0, 2)], sure=[0, 0])
        self.known = self.sure = 5
        self.others, self.rows = [other], [mine]

    def go(self, draft_tokens: int, right: int) -> None:
        case, first, before = self.case, self.known, sum(map(len, self.others))
        mine = [(2, first + i, 1) for i in range(1 + draft_tokens)]
        sure = [before, *[self.sure] * (1 + draft_tokens)]
        other, *own = case.run([(1, before, 1), *mine], sure=sure, wrong=draft_tokens - right)
        self.others.append(other)
        self.rows += own[: 1 + right]
        self.known, self.sure = first + 1 + right, first + 1


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("floor", [0.0, -5.0])
def test_accepted_drafts_are_taken_in_and_rejected_ones_leave_nothing(
    shape: tuple[int, int], dtype: torch.dtype, floor: float
) -> None:
    trial, plain = Trial(shape, dtype, floor), Trial(shape, dtype, floor)
    for step in STEPS:
        trial.go(*step)
    trial.go(0, 0)
    while plain.known < trial.known:
        plain.go(0, 0)
    rows, others = torch.cat(trial.rows), torch.cat(trial.others)
    trial.case.check(2, rows)
    trial.case.check(1, others)
    assert rows.equal(torch.cat(plain.rows)) or INTERPRETED  # NumPy's sums may differ by their surroundings
    assert all(each[[0, 3]].isnan().all() for each in trial.case.state)


def test_a_prompt_goes_on_from_drafts_that_are_not_taken_in_yet() -> None:
    """A snapshot of such a sequence is taken up by a longer prompt, beside one that decodes."""
    trial = Trial(SHAPES[0], torch.float32, -5.0)
    trial.go(3, 3)
    first, before = trial.known, sum(map(len, trial.others))
    other, rest = trial.case.run([(1, before, 1), (2, first, 66)], single=1, sure=[before, trial.sure])
    trial.case.check(2, torch.cat((*trial.rows, rest)))
    trial.case.check(1, torch.cat((*trial.others, other)))


@pytest.mark.parametrize("real", [0, 1, 4])
def test_copies_beside_drafts_give_what_the_last_row_gives(real: int) -> None:
    case = Case(*SHAPES[0], torch.float32, draft_tokens=3)
    case.memory[2].fill_(0.5)
    for each in (case.mixed, case.forget, case.beta, case.behind):
        each[0, 9] = each[2, 4 + real - 1] if real else each[0, 9]
    found = case.run([*[(2, 4 + i, 1) for i in range(real)], *[(0, 9, 1)] * 3], sure=[4] * real + [9] * 3)
    assert all(row.equal(found[real - 1] if real else row.new_zeros(row.shape)) for row in found[real:])
    assert all(each[0].isnan().all() for each in case.state)


def test_heads_of_more_channels_go_row_by_row() -> None:
    """Memories of more keys than chunks have registers for."""
    trial = Trial((1, 144), torch.float32, 0.0)
    trial.go(3, 2)
    before = sum(map(len, trial.others))
    parts = [(1, before, 1), (2, trial.known, 4)]
    other, rest = trial.case.run(parts, single=1, sure=[before, trial.sure])
    trial.case.check(2, torch.cat((*trial.rows, rest)))
    trial.case.check(1, torch.cat((*trial.others, other)))
