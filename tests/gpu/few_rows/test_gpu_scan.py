"""Prompts through memories of constant size on a GPU (or interpreted), in chunks, against float64 row by row.

Tolerances are of what a row would read if no term cancelled another. A row sums KEYS products, CHUNK rows of its own
chunk and a term of each chunk before: 2^-24 each. A running sum of logarithms up to P is wrong by 8 P 2^-24, for 64
terms whose errors do not all agree. On a GPU a product of three parts of tf32 lacks 2^-20, three times in a row.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState

if AVAILABLE:
    from tandem.mechanisms.recurrence.gpu import folds as gpu_folds
    from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates
    from tandem.mechanisms.recurrence.gpu.scan import CHUNK

pytestmark = [pytest.mark.gpu, needs_triton]
SLOTS = 5
AWKWARD = (6, 2, 12, 21)  # heads, groups, keys, values
SHAPES = [AWKWARD] if INTERPRETED else [AWKWARD, (64, 8, 128, 64), (128, 1, 128, 64)]  # Nemotron-3-Nano, Granite-4.0-H
Part = tuple[int, int, int]  # slot, tokens before, new rows


def tokens_of(shape: tuple[int, int, int, int], length: int, fastest: float) -> RecurrentTokens:
    """[SLOTS, length, …]; some heads forget nearly all at once, some nearly nothing."""
    heads, groups, keys, width = shape
    g = torch.Generator().manual_seed(heads + length)
    asked, written = (torch.randn(SLOTS, length, groups, keys, generator=g).bfloat16().float() for _ in range(2))
    values, rates = torch.randn(SLOTS, length, heads, width, generator=g), torch.logspace(-4, 0, heads) * fastest
    return RecurrentTokens(asked, written, values, -torch.rand(SLOTS, length, heads, 1, generator=g) * rates[:, None])


def exact(tokens: RecurrentTokens, slot: int) -> tuple[Tensor, Tensor]:
    """float64 [length, H, V] of one slot from nothing, and its memory behind."""
    asked, written, values, decay = (part[slot].to(DEVICE).double() for part in tokens[:4])
    heads = values.shape[1]
    asked, written = (part.repeat_interleave(heads // part.shape[1], 1) for part in (asked, written))
    memory, rows = values.new_zeros(heads, asked.shape[2], values.shape[2]), []
    for t in range(len(values)):
        memory = memory * decay[t].exp()[..., None] + written[t][..., None] * values[t][:, None]
        rows.append((memory * asked[t][..., None]).sum(1))
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
        for part in tokens[:4]
    )
    found = GpuStateUpdates().folded(RecurrentTokens(*rows), step_of(parts, single), memory)
    return list(found.cpu().split([new for _, _, new in parts]))


def check(tokens: RecurrentTokens, slot: int, found: Tensor, memory: Tensor) -> None:
    length = len(found)
    wanted, behind = exact(tokens, slot)
    whole = RecurrentTokens(*(part.abs() for part in tokens[:3]), tokens.decay)
    size, held = exact(whole, slot)
    log = max(part.abs().sum(0).max().item() for part in tokens.decay[slot].split(CHUNK))
    terms = tokens.queries.shape[-1] + CHUNK + length / CHUNK
    tolerance = (terms + 8 * log) * 2.0**-24 + (0 if INTERPRETED else 3 * 2.0**-20)
    assert ((found - wanted).abs() <= tolerance * size).all()
    assert ((memory - behind).abs() <= tolerance * held).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cuts", [[200], [1, 2, 197], [64, 65, 71], [63, 1, 136]], ids=str)
def test_every_cut_gives_what_float64_gives(shape: tuple[int, int, int, int], cuts: list[int]) -> None:
    """Two prompts and, before them, a sequence that decodes. Slots hold NaN where nothing is known yet."""
    tokens, (heads, _, keys, width), at = tokens_of(shape, 200, 2.0), shape, 0
    memory = torch.full((SLOTS, heads, keys, width), float("nan"), device=DEVICE)
    found: dict[int, list[Tensor]] = {1: [], 2: [], 4: []}
    for index, count in enumerate(cuts):
        parts = [(1, index, 1), (4, at, count), (2, at, count)]
        for (slot, _, _), rows in zip(parts, run(tokens, parts, memory, single=1), strict=True):
            found[slot].append(rows)
        at += count
    for slot in (2, 4):
        check(tokens, slot, torch.cat(found[slot]), memory[slot].cpu())
    few = RecurrentTokens(*(part[:, : len(cuts)] for part in tokens[:4]))
    check(few, 1, torch.cat(found[1]), memory[1].cpu())
    assert memory[[0, 3]].isnan().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_forgotten_at_once_leaves_nothing(shape: tuple[int, int, int, int]) -> None:
    """Logarithms far below what float32 can hold the exponential of."""
    tokens, (heads, _, keys, width) = tokens_of(shape, 130, 300.0), shape
    memory = torch.zeros(SLOTS, heads, keys, width, device=DEVICE)
    check(tokens, 3, run(tokens, [(3, 0, 130)], memory)[0], memory[3].cpu())


def test_rows_that_decode_have_the_same_bits_beside_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what cannot be scanned goes row by row."""
    tokens = tokens_of(AWKWARD, 70, 2.0)
    memory, alone = (torch.zeros(SLOTS, 6, 12, 21, device=DEVICE) for _ in range(2))
    beside = run(tokens, [(1, 0, 1), (2, 0, 70)], memory, single=1)
    assert beside[0].equal(run(tokens, [(1, 0, 1)], alone)[0]) and memory[1].equal(alone[1])
    monkeypatch.setattr(gpu_folds, "way_of", lambda tokens: None)
    rows = run(tokens, [(2, 0, 70)], alone)[0]
    check(tokens, 2, rows, alone[2].cpu())
    assert not rows.equal(beside[1])
