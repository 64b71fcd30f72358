"""Prompts through memories that are corrected, on a GPU (or interpreted), in chunks, against float64 row by row.

Keys have unit length and beta is at most 1, so what a row multiplies the memory with makes no number larger, and an
error goes on at most as it is. Tolerances are of the root mean square. A product sums KEYS or CHUNK terms: 2^-24 each.
A logarithm is a sum of at most CHUNK terms, and times its exponential at most 1 / e: 2^-24 each again. On a GPU a
product of three parts of tf32 lacks 2^-20, three times in a row.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState

if AVAILABLE:
    from tandem.mechanisms.recurrence.gpu import folds as gpu_folds
    from tandem.mechanisms.recurrence.gpu.correct import CHUNK
    from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates

pytestmark = [pytest.mark.gpu, needs_triton]
SLOTS = 5
Shape = tuple[int, int, int, int]  # heads, groups, keys, values
AWKWARD = (4, 2, 12, 21)
SHAPES = [AWKWARD] if INTERPRETED else [AWKWARD, (32, 32, 128, 128)]  # Kimi-Linear
Part = tuple[int, int, int]  # slot, tokens before, new rows


def tokens_of(shape: Shape, length: int, fastest: float, apart: bool = True) -> RecurrentTokens:
    """[SLOTS, length, …]; some channels forget nearly all at once, some nothing."""
    heads, groups, keys, width = shape
    g, channels = torch.Generator().manual_seed(heads + length), keys if apart else 1
    asked, written = (F.normalize(torch.randn(SLOTS, length, groups, keys, generator=g), dim=-1) for _ in range(2))
    rates = torch.logspace(-4, 0, heads * channels).view(heads, channels) * fastest
    if apart:
        rates[:, ::5] = 0.0
    return RecurrentTokens(
        asked, written, torch.randn(SLOTS, length, heads, width, generator=g),
        -torch.rand(SLOTS, length, heads, channels, generator=g) * rates,
        torch.rand(SLOTS, length, heads, generator=g),
    )  # fmt: skip


def exact(tokens: RecurrentTokens, slot: int) -> tuple[Tensor, Tensor]:
    """float64 [length, H, V] of one slot from nothing, and its memory behind."""
    asked, written, values, decay, beta = (part[slot].to(DEVICE).double() for part in tokens if part is not None)
    heads = values.shape[1]
    asked, written = (part.repeat_interleave(heads // part.shape[1], 1)[..., None] for part in (asked, written))
    memory, rows = values.new_zeros(heads, asked.shape[2], values.shape[2]), []
    for t in range(len(values)):
        memory = memory * decay[t].exp()[..., None]
        wrong = values[t] - (memory * written[t]).sum(1)
        memory = memory + written[t] * (wrong * beta[t][:, None])[:, None]
        rows.append((memory * asked[t]).sum(1))
    return torch.stack(rows).cpu(), memory.cpu()


def step_of(parts: list[Part], single: int) -> ForwardState:
    starts = torch.tensor([0, *(new for _, _, new in parts)]).cumsum(0)
    where = torch.cat([torch.arange(before, before + new) for _, before, new in parts]).to(DEVICE)
    batch = ForwardBatch(
        where, where, where, starts.int().to(DEVICE),
        torch.tensor([before + new for _, before, new in parts], dtype=torch.int32, device=DEVICE),
        torch.zeros(len(parts), 1, dtype=torch.int32, device=DEVICE), where[:1],
        torch.tensor([slot for slot, _, _ in parts], dtype=torch.int32, device=DEVICE), single,
    )  # fmt: skip
    return ForwardState(batch, torch.empty(0))


def run(tokens: RecurrentTokens, parts: list[Part], memory: Tensor, single: int = 0) -> list[Tensor]:
    """What each part reads."""
    rows = (
        torch.cat([part[slot, before : before + new] for slot, before, new in parts]).to(DEVICE)
        for part in tokens
        if part is not None
    )
    found = GpuStateUpdates().folded(RecurrentTokens(*rows), step_of(parts, single), memory)
    return list(found.cpu().split([new for _, _, new in parts]))


def check(tokens: RecurrentTokens, slot: int, found: Tensor, memory: Tensor) -> None:
    wanted, behind = exact(tokens, slot)
    terms = tokens.queries.shape[-1] + CHUNK
    tolerance = terms * 2.0**-24 + (0 if INTERPRETED else 3 * 2.0**-20)
    for got, right in ((found, wanted), (memory, behind)):
        error = (got.double() - right).norm() / right.norm()
        assert error <= tolerance, f"{float(error):.2e} of {tolerance:.2e}"


@pytest.mark.parametrize("apart", [True, False], ids=["channels", "heads"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cuts", [[200], [1, 2, 197], [64, 65, 71], [63, 1, 136], [17, 15, 168]], ids=str)
def test_every_cut_gives_what_float64_gives(shape: Shape, cuts: list[int], apart: bool) -> None:
    """Two prompts and, before them, a sequence that decodes. Slots hold NaN where nothing is known yet."""
    tokens, (heads, _, keys, width), at = tokens_of(shape, 200, 2.0, apart), shape, 0
    memory = torch.full((SLOTS, heads, keys, width), float("nan"), device=DEVICE)
    found: dict[int, list[Tensor]] = {1: [], 2: [], 4: []}
    for index, count in enumerate(cuts):
        parts = [(1, index, 1), (4, at, count), (2, at, count)]
        for (slot, _, _), rows in zip(parts, run(tokens, parts, memory, single=1), strict=True):
            found[slot].append(rows)
        at += count
    for slot in (2, 4):
        check(tokens, slot, torch.cat(found[slot]), memory[slot].cpu())
    few = RecurrentTokens(*(part[:, : len(cuts)] for part in tokens if part is not None))
    check(few, 1, torch.cat(found[1]), memory[1].cpu())
    assert memory[[0, 3]].isnan().all()


def test_prompts_of_any_lengths_together() -> None:
    tokens, memory = tokens_of(AWKWARD, 130, 2.0), torch.zeros(SLOTS, 4, 12, 21, device=DEVICE)
    parts = [(3, 0, 3), (1, 0, 130), (0, 0, 1), (4, 0, 64), (2, 0, 49)]
    for (slot, _, new), rows in zip(parts, run(tokens, parts, memory), strict=True):
        check(RecurrentTokens(*(part[:, :new] for part in tokens if part is not None)), slot, rows, memory[slot].cpu())


@pytest.mark.parametrize("log", [-50.0, -1e4, float("-inf")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_forgotten_at_once_leaves_nothing(shape: Shape, log: float) -> None:
    """Rows here and there forget some channels or all, between others that forget nothing. A sum of logarithms, less
    another, would have lost the small ones."""
    tokens, (heads, _, keys, width) = tokens_of(shape, 130, 0.01), shape
    g = torch.Generator().manual_seed(7)
    tokens.decay[torch.rand(tokens.decay.shape, generator=g) < 0.1] = log
    tokens.decay[:, 40] = log
    memory = torch.zeros(SLOTS, heads, keys, width, device=DEVICE)
    check(tokens, 3, run(tokens, [(3, 0, 130)], memory)[0], memory[3].cpu())


@pytest.mark.parametrize("log", [0.0, -1e-6])
def test_equal_keys_that_are_all_learnt_do_not_blow_up(log: float) -> None:
    """The inverse within a chunk: with equal keys and beta 1 its powers would cancel 10^18."""
    tokens = tokens_of(AWKWARD, 128, 0.0)
    tokens.written[:] = tokens.written[:, :1]
    assert tokens.beta is not None
    tokens.beta[:] = 1.0
    tokens.decay[:] = log
    memory = torch.zeros(SLOTS, 4, 12, 21, device=DEVICE)
    check(tokens, 1, run(tokens, [(1, 0, 128)], memory)[0], memory[1].cpu())


def test_rows_without_a_key_learn_nothing() -> None:
    tokens, memory = tokens_of(AWKWARD, 70, 1.0), torch.zeros(SLOTS, 4, 12, 21, device=DEVICE)
    tokens.written[:, 5:60], tokens.queries[:, ::3] = 0.0, 0.0
    rows = run(tokens, [(2, 0, 70)], memory)[0]
    check(tokens, 2, rows, memory[2].cpu())
    assert rows[::3].eq(0).all()


def test_rows_that_decode_have_the_same_bits_beside_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what chunks have no code for goes row by row."""
    tokens = tokens_of(AWKWARD, 70, 2.0)
    memory, alone = (torch.zeros(SLOTS, 4, 12, 21, device=DEVICE) for _ in range(2))
    beside = run(tokens, [(1, 0, 1), (2, 0, 70)], memory, single=1)
    assert beside[0].equal(run(tokens, [(1, 0, 1)], alone)[0]) and memory[1].equal(alone[1])
    monkeypatch.setattr(gpu_folds, "way_of", lambda tokens: None)
    rows = run(tokens, [(2, 0, 70)], alone)[0]
    check(tokens, 2, rows, alone[2].cpu())
    assert not rows.equal(beside[1])
