"""Which tokens each row attends to where blocks of tokens have the mean of their keys: what such an indexer is bound
to, and its oracle."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.ops import Ops
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepContext, StepRows
from tandem.mechanisms.mean_index.rows import as_sequences
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.token_index.pooled import PooledKeys


class MeanWeights(NamedTuple):
    """float32: of norms [dim], 1 included, and rotary tables as `RopeTables` has them."""

    query: Tensor
    key: Tensor
    cos: Tensor
    sin: Tensor


class ChooseBlocks(Protocol):
    """An indexer behind its matrix."""

    def __call__(self, q: Tensor, k: Tensor, step: StepContext, cache: PooledKeys) -> SelectedKeys | None:
        """q [T, heads * dim] and k [T, dim], before norm and rotation → each row's choice. It has the tokens of the
        blocks with the highest scores, and those behind the last whole block. Of equal scores the earliest count. None:
        all tokens up to itself, for every row. Scores are float32; a row's choice depends on its own sequence only, not
        on how that was cut. Of `cache` the ring holds keys as they come."""
        ...

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, chosen: SelectedKeys, scale: float) -> Tensor:
        """As `Ops.attention`, where each row looks at the rows of the cache that it has chosen, and at nothing else."""
        ...


class TorchMeanIndex:
    """`ChooseBlocks` in plain torch: the oracle. It computes in the type of the norms' weights."""

    def __init__(self, ops: Ops, shape: MeanIndex, weights: MeanWeights) -> None:
        self.ops, self.shape, self.weights, self.wide = ops, shape, weights, weights.key.dtype

    def __call__(self, q: Tensor, k: Tensor, step: StepContext, cache: PooledKeys) -> SelectedKeys:
        close_blocks(k, step.rows, cache, self.shape, self.weights)
        queries = turned(normed_queries(q, self.shape, self.weights), step.batch.positions, self.weights)
        rows, batch = list[Tensor](), step.batch
        starts, page = batch.query_starts.tolist(), cache.tokens.shape[1]
        for i, length in enumerate(batch.seq_lens.tolist()):
            at = torch.arange(length)
            token_rows = batch.block_tables[i].long()[at // page] * page + at % page
            for t in range(starts[i], starts[i + 1]):
                visible = length - starts[i + 1] + t + 1
                rows.append(token_rows[self._chosen(queries[t], token_rows[:visible], cache.keys)].int())
        filled = torch.stack([F.pad(each, (0, self.shape.most - len(each))) for each in rows])
        return SelectedKeys(filled, torch.tensor([len(each) for each in rows], dtype=torch.int32))

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, chosen: SelectedKeys, scale: float) -> Tensor:
        return self.ops.attention(*as_sequences(q, k_pages, v_pages, chosen), scale)

    def _chosen(self, q: Tensor, token_rows: Tensor, pages: Tensor) -> Tensor:
        """Positions, ascending, of a row that sees the tokens at `token_rows`. q [heads, dim]."""
        s, whole = self.shape, len(token_rows) // self.shape.pool
        keys = pages.flatten(0, 1)[token_rows[: whole * s.pool : s.pool] // s.pool, 0].to(self.wide)
        scores = (q.to(self.wide) @ keys.T).relu().sum(0)
        best = torch.sort(scores, stable=True, descending=True).indices[: s.budget // s.pool].sort().values
        tokens = best[:, None] * s.pool + torch.arange(s.pool)
        return torch.cat((tokens.flatten(), torch.arange(whole * s.pool, len(token_rows))))


def normed_queries(q: Tensor, shape: MeanIndex, weights: MeanWeights) -> Tensor:
    """[T, heads, dim], before they turn."""
    return _normed(q.view(len(q), shape.heads, shape.dim), weights.query, shape.norm.eps)


def close_blocks(k: Tensor, rows: StepRows, cache: PooledKeys, shape: MeanIndex, weights: MeanWeights) -> None:
    """Writes keys of blocks whose last tokens are among the rows, and keeps what the rows have made."""
    pool, wide = shape.pool, weights.key.dtype
    known, at = rows.taken_in(cache.ring, k, pool)
    closing = rows.once(("closing", pool), lambda: ((rows.positions + 1) % pool == 0).nonzero().flatten())
    if len(closing):
        tokens = known[at.flip(1)[closing]]
        total = tokens[:, 0].to(wide)
        for i in range(1, pool):  # one after the other: bits must not depend on how many close together
            total = total + tokens[:, i].to(wide)
        means = _normed((total / pool).to(k.dtype)[:, None], weights.key, shape.norm.eps)
        keys = turned(means, rows.positions[closing] - (pool - 1), weights)
        cache.keys.flatten(0, 1)[rows.cache_slots[closing] // pool] = keys.to(cache.keys.dtype)


def turned(x: Tensor, positions: Tensor, weights: MeanWeights) -> Tensor:
    """x [T, n, dim], its first channels turned as halves; tables, products and sums in x's type."""
    half = weights.cos.shape[1]
    cos, sin = (table[positions][:, None].to(x.dtype) for table in (weights.cos, weights.sin))
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.to(weight.dtype)
    normed: Tensor = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype)


def bound(ops: Ops, shape: MeanIndex, weights: MeanWeights) -> ChooseBlocks:
    return TorchMeanIndex(ops, shape, weights)
