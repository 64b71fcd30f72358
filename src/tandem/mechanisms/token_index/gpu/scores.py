"""Scores of the tokens that rows may look at: heads against a block of keys on tensor cores, then their weighted sum.

A row's keys are divided among programs: program p takes blocks p, p + parts, … A score depends on its row and key
alone, so the division changes nothing. Rows that see no more tokens than they may choose have no scores.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.mechanisms.latent.gpu.per_head import precision

KEYS = 128  # of a block
PROGRAMS = 1024  # as many are wanted: eight for each multiprocessor of an H100
VARYING = ["first", "table_width", "out_row"]


class Scoring(Protocol):
    """heads of dim channels each; rows that see no more than budget keys have no scores."""

    @property
    def heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def budget(self) -> int: ...


class ScoredKeys(NamedTuple):
    """Whose tokens each row sees: all up to positions int64 [T], in pages tables int32 [S, P] of its sequence, which is
    owners int32 [T]; None: row t is sequence t."""

    pages: Tensor  # [num_pages, page_size, 1, dim]
    tables: Tensor
    positions: Tensor
    owners: Tensor | None

    @property
    def width(self) -> int:
        """Tokens of a table."""
        return int(self.tables.shape[1]) * int(self.pages.shape[1])


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["tables", "positions", "owners"])
def _token_scores(q, gates, keys, tables, positions, owners, out, first, table_width, out_row,
                  HEADS: tl.constexpr, DIM: tl.constexpr, BUDGET: tl.constexpr, PAGE: tl.constexpr,
                  OWNED: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
                  PRECISION: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    part, hop = tl.program_id(0) * KEYS, tl.num_programs(0) * KEYS
    t = first + tl.program_id(1).to(tl.int64)
    n = tl.load(positions + t).to(tl.int32) + 1
    if (n <= BUDGET) | (part >= n):
        return
    table = tables + (tl.load(owners + t).to(tl.int64) if OWNED else t) * table_width
    h, d = tl.arange(0, BLOCK), tl.arange(0, WIDE)
    x = tl.load(
        q + (t * HEADS + h)[:, None] * DIM + d[None, :], (h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0
    )
    gate = tl.load(gates + t * HEADS + h, h < HEADS, other=0.0)
    row = out + tl.program_id(1).to(tl.int64) * out_row
    for start in range(part, n, hop):
        j = start + tl.arange(0, KEYS)
        page = tl.load(table + j // PAGE, j < n, other=0).to(tl.int64)
        at = (page * PAGE + j % PAGE) * DIM
        k = tl.load(keys + at[:, None] + d[None, :], (j < n)[:, None] & (d < DIM)[None, :], other=0.0)
        products = tl.dot(k, tl.trans(x), input_precision=PRECISION)
        tl.store(row + j, tl.sum(tl.maximum(products, 0.0) * gate[None, :], 1), j < n)


def token_scores(q: Tensor, gates: Tensor, keys: ScoredKeys, rows: range, shape: Scoring, out: Tensor) -> None:
    """q [T, heads * dim], turned, and gates float32 [T, heads], of which rows `rows` → out float32 [rows, width]."""
    blocks = triton.cdiv(keys.width, KEYS)
    parts = max(1, min(blocks, PROGRAMS // max(1, len(rows))))
    _token_scores[(parts, len(rows))](
        q, gates, keys.pages, keys.tables, keys.positions, keys.positions if keys.owners is None else keys.owners, out,
        rows.start, keys.tables.shape[1], out.stride(0), HEADS=shape.heads, DIM=shape.dim, BUDGET=shape.budget,
        PAGE=keys.pages.shape[1], OWNED=keys.owners is not None, KEYS=KEYS,
        BLOCK=max(16, triton.next_power_of_2(shape.heads)), WIDE=max(16, triton.next_power_of_2(shape.dim)),
        PRECISION=precision(q), num_warps=8 if q.dtype is torch.bfloat16 else 4, **overlapped(q.device),
    )  # fmt: skip
