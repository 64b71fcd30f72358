"""Which tokens each row attends to where several tokens have one key: what such an indexer is bound to, and its oracle.

A key is closed when the last of its tokens comes. Until then what they have made lies in a ring.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepContext, StepRows
from tandem.mechanisms.token_index.shape import Index
from tandem.spec.state import LANES


class KeyPoolWeights(NamedTuple):
    """float32: of keys' norm [dim], and what is added to gates by a token's place in its pool [pool, dim]."""

    norm: Tensor
    bias: Tensor
    places: Tensor


class PooledKeys(NamedTuple):
    """Cached keys: pages of all tokens [num_pages, page_size, …], of which only the sizes count; normed keys and gates
    of the last tokens of each slot [slots, R, 2 * dim]; closed keys [num_pages, page_size / pool, 1, dim]."""

    tokens: Tensor
    ring: Tensor
    keys: Tensor


class PooledIndex(Protocol):
    """An indexer between its matrices."""

    def __call__(
        self, q: Tensor, raw_keys: Tensor, gates: Tensor, step: StepContext, cache: PooledKeys
    ) -> SelectedKeys | None:
        """q [T, heads * dim], raw_keys [T, 2 * dim]: a key, before its norm, and its gates; gates float32 [T, heads] →
        each row's choice: the tokens of the keys with the highest scores, of equal ones the earliest, and those behind
        the last whole pool; None: all tokens up to itself, for every row. Scores are float32; a row's choice depends on
        its own sequence only, not on how that was cut."""
        ...


class TorchPooledIndex:
    """`PooledIndex` in plain torch: the oracle. It computes in the type of the norm's weights."""

    def __init__(self, shape: Index, weights: KeyPoolWeights) -> None:
        self.shape, self.weights, self.wide = shape, weights, weights.norm.dtype

    def __call__(
        self, q: Tensor, raw_keys: Tensor, gates: Tensor, step: StepContext, cache: PooledKeys
    ) -> SelectedKeys:
        close_pools(raw_keys, step.rows, cache, self.shape, self.weights)
        rows, batch = list[Tensor](), step.batch
        starts, page = batch.query_starts.tolist(), cache.tokens.shape[1]
        for i, length in enumerate(batch.seq_lens.tolist()):
            at = torch.arange(length)
            token_rows = batch.block_tables[i].long()[at // page] * page + at % page
            for t in range(starts[i], starts[i + 1]):
                visible = length - starts[i + 1] + t + 1
                rows.append(token_rows[self._chosen(q[t], gates[t], token_rows[:visible], cache.keys)].int())
        filled = torch.stack([F.pad(each, (0, self.shape.most - len(each))) for each in rows])
        return SelectedKeys(filled, torch.tensor([len(each) for each in rows], dtype=torch.int32))

    def _chosen(self, q: Tensor, gates: Tensor, token_rows: Tensor, pages: Tensor) -> Tensor:
        """Positions, ascending, of a row that sees the tokens at `token_rows`."""
        s, whole = self.shape, len(token_rows) // self.shape.pool
        keys = pages.flatten(0, 1)[token_rows[: whole * s.pool : s.pool] // s.pool, 0].to(self.wide)
        scores = gates.to(self.wide) @ (q.view(s.heads, s.dim).to(self.wide) @ keys.T).relu()
        best = torch.sort(scores, stable=True, descending=True).indices[: s.budget // s.pool].sort().values
        tokens = best[:, None] * s.pool + torch.arange(s.pool)
        return torch.cat((tokens.flatten(), torch.arange(whole * s.pool, len(token_rows))))


def close_pools(raw_keys: Tensor, rows: StepRows, cache: PooledKeys, shape: Index, weights: KeyPoolWeights) -> None:
    """Writes keys whose last tokens are among the rows, and keeps what the rows have made. Weights of a pool's keys are
    rounded to the keys' type, as Transformers does."""
    dim, pool, wide = shape.dim, shape.pool, weights.norm.dtype
    normed = F.layer_norm(raw_keys[:, :dim].to(wide), (dim,), weights.norm, weights.bias, shape.eps)
    new = torch.cat((normed.to(raw_keys.dtype), raw_keys[:, dim:]), 1)
    known, at = rows.taken_in(cache.ring, new, pool)
    closing = rows.once(("closing", pool), lambda: ((rows.positions + 1) % pool == 0).nonzero().flatten())
    if len(closing):
        tokens = known[at.flip(1)[closing]]
        keys, gates = tokens.split(dim, -1)
        shares = _shares(gates.to(wide) + weights.places).to(raw_keys.dtype).to(wide)
        total = shares[:, 0] * keys[:, 0].to(wide)
        for i in range(1, pool):  # one after the other: bits must not depend on how many close together
            total += shares[:, i] * keys[:, i].to(wide)
        cache.keys.flatten(0, 1)[rows.cache_slots[closing] // pool] = total[:, None].to(cache.keys.dtype)


def _shares(gates: Tensor) -> Tensor:
    """Softmax of [C, pool, dim] over a pool, of whole vectors, as in `mechanisms/compressed_attention/entries.py`."""
    width = gates.shape[2]
    return F.pad(gates, (0, -width % (2 * LANES))).softmax(1)[:, :, :width]
