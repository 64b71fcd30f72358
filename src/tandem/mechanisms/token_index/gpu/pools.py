"""Pools of tokens that a row looks at: their keys are chosen as a token's are, and each stands for all its tokens.

Tokens behind a row's last whole pool follow those of the chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_lengths import lengths_of
from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.token_index.gpu.index import chosen_keys
from tandem.mechanisms.token_index.gpu.scores import ScoredKeys
from tandem.mechanisms.token_index.pooled import PooledKeys

EACH = 1024  # chosen tokens of a program


@dataclass(frozen=True, slots=True)
class Pools:
    """Sizes of a choice: heads of `dim` channels score keys of `size` tokens, of which `budget` are chosen."""

    heads: int
    dim: int
    budget: int
    size: int

    @property
    def most(self) -> int:
        """Tokens that a row looks at, at most."""
        return self.budget * self.size + self.size - 1


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=["tables", "positions", "owners"])
def _spread_pools(pools, positions, owners, tables, out, counts, table_width, BUDGET: tl.constexpr, POOL: tl.constexpr,
                  PAGE: tl.constexpr, MOST: tl.constexpr, OWNED: tl.constexpr, EACH: tl.constexpr,
                  OVERLAP: tl.constexpr):  # fmt: skip
    """Cache rows of a row's tokens, EACH of them in a program: those of its pools, then those behind the last whole
    one; zeros fill the list."""
    begin(OVERLAP)
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH + tl.arange(0, EACH)
    length = tl.load(positions + t).to(tl.int32) + 1
    whole = length // POOL
    pooled = tl.minimum(whole, BUDGET) * POOL
    count = pooled + length - whole * POOL
    pool = tl.load(pools + t * BUDGET + i // POOL, i < pooled, other=0)
    position = whole * POOL + i - pooled
    behind = (i >= pooled) & (i < count)
    table = tables + (tl.load(owners + t).to(tl.int64) if OWNED else t) * table_width
    page = tl.load(table + position // PAGE, behind, other=0)
    row = tl.where(i < pooled, pool * POOL + i % POOL, page * PAGE + position % PAGE)
    tl.store(out + t * MOST + i, tl.where(i < count, row, 0), i < MOST)
    tl.store(counts + t, count, tl.program_id(1) == 0)


def _all_seen(step: StepContext, page: int, most: int) -> bool:
    """Whether no row sees more than `most` tokens. Rows that decode may be in a graph, which is replayed for longer
    sequences: as many as their tables have room for."""
    if step.rows.tables.shape[1] * page <= most:
        return True
    return not step.rows.row_per_sequence and max(lengths_of(step.batch).ends) <= most


def chosen_tokens(q: Tensor, gates: Tensor, step: StepContext, cache: PooledKeys, pools: Pools) -> SelectedKeys | None:
    """Tokens of each row's best pools, and those behind its last whole one: q [T, heads * dim], turned; gates float32
    [T, heads]. None: all tokens up to itself, for every row."""
    rows, page = step.rows, cache.tokens.shape[1]
    if _all_seen(step, page, pools.most):
        return None
    last = rows.once(("last pool", pools.size), lambda: (rows.positions + 1) // pools.size - 1)
    tables = rows.once("int32 tables", rows.tables.int)
    owners = None if rows.row_per_sequence else rows.once("int32 sequences", rows.sequence.int)
    best = chosen_keys(q, gates, ScoredKeys(cache.keys, tables, last, owners), pools)
    chosen = SelectedKeys(*(q.new_empty(size, dtype=torch.int32) for size in ((len(q), pools.most), (len(q),))))
    _spread_pools[(len(q), triton.cdiv(pools.most, EACH))](
        best.rows, rows.positions, rows.positions if owners is None else owners, tables, *chosen, tables.shape[1],
        BUDGET=pools.budget, POOL=pools.size, PAGE=page, MOST=pools.most, OWNED=owners is not None, EACH=EACH,
        num_warps=4, **overlapped(q.device),
    )  # fmt: skip
    return chosen
