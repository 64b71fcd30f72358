"""The best tokens of each row, in the order of their positions.

A list of scores is cut into pieces, and of each piece the `budget` best are kept, in order: the list is a fraction as
long. That goes on until one piece is left. What is among the best of all is among the best of its piece, so nothing is
lost. How often it goes on depends on the longest possible context alone, as CUDA graphs need it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.token_index.gpu.scores import ScoredKeys

SHRINK = 4  # a piece is so many times as long as what is kept of it
LARGEST_PIECE = 8192  # 32 scores in the registers of each thread
VARYING = ["first", "table_width", "list_row", "kept_row"]


class Lists(NamedTuple):
    """Candidates of each row: scores float32 [rows, n], and positions int32 [rows, n]; None: scores are in their
    order."""

    scores: Tensor
    positions: Tensor | None


@triton.jit
def ordered(x):
    """float32 as int32 in the same order; both zeros are equal, and what is no number is above or below all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(key, target):
    """A number that exactly `target` of the keys reach, or the largest that at least so many reach: bit by bit, from
    the sign on. Scores differ in their first bits, so the last ones are seldom asked for."""
    reach = tl.sum((key >= 0).to(tl.int32))
    least = tl.where(reach >= target, 0, -2147483648).to(tl.int32)
    reach = tl.where(reach >= target, reach, target + 1)
    bit = (target * 0 + (1 << 30)).to(tl.int32)
    while (bit > 0) & (reach != target):
        count = tl.sum((key >= least + bit).to(tl.int32))
        least = tl.where(count >= target, least + bit, least)
        reach = tl.where(count >= target, count, reach)
        bit = bit >> 1
    return least


@triton.jit
def _length(n, level, PIECE: tl.constexpr, BUDGET: tl.constexpr):
    """Length of a row's list after `level` times; every piece but the last is full."""
    for _ in range(level):
        whole = (n - 1) // PIECE
        n = whole * BUDGET + tl.minimum(n - whole * PIECE, BUDGET)
    return n


@triton.jit(do_not_specialize=[*VARYING, "level"], do_not_specialize_on_alignment=["tables", "positions", "owners"])
def _keep_best(scores, listed, positions, owners, tables, kept_scores, out, counts, first, level, list_row, kept_row,
               table_width, PIECE: tl.constexpr, BUDGET: tl.constexpr, PAGE: tl.constexpr, LISTED: tl.constexpr,
               OWNED: tl.constexpr, LAST: tl.constexpr, FILL: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    piece, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t = first + r
    visible = tl.load(positions + t).to(tl.int32) + 1
    n = _length(visible, level, PIECE, BUDGET)
    if piece * PIECE >= n:
        return
    i = piece * PIECE + tl.arange(0, PIECE)
    inside, count = i < n, tl.minimum(n - piece * PIECE, PIECE)
    position = tl.load(listed + r * list_row + i, inside, other=0) if LISTED else i
    chosen, x = inside, tl.zeros([PIECE], tl.float32)
    if visible > BUDGET:  # else there are no scores
        x = tl.load(scores + r * list_row + i, inside, other=0.0)
    if count > BUDGET:
        key = tl.where(inside, ordered(x), -2147483648)
        least = _threshold(key, piece * 0 + BUDGET)
        above, equal = inside & (key > least), inside & (key == least)
        spare = BUDGET - tl.sum(above.to(tl.int32))
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    place = piece * BUDGET + tl.cumsum(chosen.to(tl.int32), 0) - 1
    if LAST:
        table = tables + (tl.load(owners + t).to(tl.int64) if OWNED else t) * table_width
        page = tl.load(table + position // PAGE, chosen, other=0)
        tl.store(out + t * BUDGET + place, page * PAGE + position % PAGE, chosen)
        rest = tl.arange(0, FILL)
        tl.store(out + t * BUDGET + rest, tl.zeros([FILL], tl.int32), (rest >= count) & (rest < BUDGET))
        tl.store(counts + t, tl.minimum(visible, BUDGET))
    else:
        tl.store(kept_scores + r * kept_row + place, x, chosen)
        tl.store(out + r * kept_row + place, position, chosen)


def piece_of(budget: int) -> int:
    return 1 << (max(2 * budget, min(SHRINK * budget, LARGEST_PIECE), 16) - 1).bit_length()


def lengths(width: int, budget: int) -> list[int]:
    """Lengths of a row's lists, the first of `width` scores, the last of no more than a piece."""
    piece, sizes = piece_of(budget), [width]
    while sizes[-1] > piece:
        sizes.append(-(-sizes[-1] // piece) * budget)
    return sizes


def keep_best(scores: Tensor, keys: ScoredKeys, rows: range, chosen: SelectedKeys) -> None:
    """Rows `rows` of `chosen`, by scores float32 [len(rows), width]."""
    budget = chosen.rows.shape[1]
    lists, sizes = Lists(scores, None), lengths(keys.width, budget)
    for level, following in enumerate(sizes[1:]):
        shape = len(rows), following
        best = Lists(scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int32))
        _level(lists, best, keys, rows, chosen, level)
        lists = best
    _level(lists, None, keys, rows, chosen, len(sizes) - 1)


def _level(lists: Lists, best: Lists | None, keys: ScoredKeys, rows: range, chosen: SelectedKeys, level: int) -> None:
    """best: None for the last time."""
    budget, width = chosen.rows.shape[1], lists.scores.shape[1]
    piece, owners = piece_of(budget), keys.owners if best is None else None
    to = (lists.scores, chosen.rows) if best is None or best.positions is None else (best.scores, best.positions)
    _keep_best[(triton.cdiv(width, piece), len(rows))](
        lists.scores, to[1] if lists.positions is None else lists.positions, keys.positions,
        keys.positions if owners is None else owners, keys.tables, *to,
        chosen.counts, rows.start, level, lists.scores.stride(0), to[0].stride(0), keys.tables.shape[1], PIECE=piece,
        BUDGET=budget, PAGE=keys.pages.shape[1], LISTED=lists.positions is not None,
        OWNED=owners is not None, LAST=best is None, FILL=triton.next_power_of_2(budget),
        num_warps=max(4, min(16, piece // 1024)), **overlapped(lists.scores.device),
    )  # fmt: skip
