"""Which tokens each row attends to: what a lightning indexer is bound to, the same on every machine, and its oracle."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.token_index.pooled import KeyPoolWeights, PooledIndex, TorchPooledIndex
from tandem.mechanisms.token_index.shape import Index


class IndexWeights(NamedTuple):
    """Weights of the keys' norm, float32 [dim], and rotary tables as `RopeTables` has them, float32 [positions, rotary
    channels / 2]."""

    norm: Tensor
    bias: Tensor
    cos: Tensor
    sin: Tensor


class TokenIndex(Protocol):
    """An indexer between its matrices."""

    def __call__(self, q: Tensor, k: Tensor, gates: Tensor, batch: KernelBatch, pages: Tensor) -> SelectedKeys | None:
        """q [T, heads * dim] and k [T, dim], before norm and rotation, gates float32 [T, heads] → each row's choice;
        None: all tokens up to itself, for every row.

        The key of row t goes to row batch.cache_slots[t] of pages [num_pages, page_size, 1, dim]. A row chooses of
        all tokens up to itself: all of them, or the `budget` with the highest scores, of equal ones the earliest.
        Scores are float32, whatever is cached. A row's choice depends on its own sequence only, not on how that was
        cut (a GPU's scores may differ in last bits).
        """
        ...


class TorchTokenIndex:
    """`TokenIndex` in plain torch: the oracle. It computes in the type of the norm's weights."""

    def __init__(self, shape: Index, weights: IndexWeights) -> None:
        self.shape, self.weights, self.wide = shape, weights, weights.norm.dtype

    def __call__(self, q: Tensor, k: Tensor, gates: Tensor, batch: KernelBatch, pages: Tensor) -> SelectedKeys:
        s = self.shape
        self.store(k, batch, pages)
        queries = self._turned(q.view(len(q), s.heads, s.dim), batch.positions)
        rows = q.new_zeros((len(q), s.budget), dtype=torch.int32)
        starts = batch.query_starts.tolist()
        for i, length in enumerate(batch.seq_lens.tolist()):
            token_rows = self._rows_of(batch.block_tables[i], length, pages.shape[1])
            known = pages.view(-1, s.dim)[token_rows]
            for t in range(starts[i], starts[i + 1]):
                visible = length - starts[i + 1] + t + 1
                best = self._best(queries[t], gates[t], known[:visible])
                rows[t, : len(best)] = token_rows[best].int()
        return SelectedKeys(rows, (batch.positions + 1).clamp(max=s.budget).int())

    def store(self, k: Tensor, batch: KernelBatch, pages: Tensor) -> None:
        s, w = self.shape, self.weights
        keys = F.layer_norm(k.to(self.wide), (s.dim,), w.norm, w.bias, s.eps).to(k.dtype)
        pages.view(-1, s.dim)[batch.cache_slots] = self._turned(keys[:, None], batch.positions)[:, 0]

    def _best(self, q: Tensor, gates: Tensor, keys: Tensor) -> Tensor:
        """Positions, ascending. A stable sort, not topk, so that equal scores give the earlier one."""
        scores = gates.to(self.wide) @ (q.to(self.wide) @ keys.to(self.wide).T).relu()
        best = torch.sort(scores, stable=True, descending=True).indices[: self.shape.budget]
        return best.sort().values

    @staticmethod
    def _rows_of(table: Tensor, length: int, page: int) -> Tensor:
        """Where a sequence's tokens lie in the cache."""
        at = torch.arange(length)
        return table.long()[at // page] * page + at % page

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, n, dim], its rotary channels as halves; tables, products and sum in x's dtype."""
        w, half = self.weights, self.shape.rope.dims // 2
        cos, sin = (table[positions][:, None].to(x.dtype) for table in (w.cos, w.sin))
        pairs = self.shape.rope.pairs == "neighbours"
        a, b = (
            (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2])
            if pairs
            else (x[..., :half], x[..., half : 2 * half])
        )
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


def attend_chosen(q: Tensor, pages: Tensor, batch: KernelBatch, scale: float, chosen: SelectedKeys) -> Tensor:
    """q [T, H, D] over one kv head's pages, whose keys are values, too → [T, H * D]. The oracle."""
    known = pages.flatten(0, 1)[chosen.rows.long(), 0]
    mask = torch.arange(known.shape[1]) < chosen.counts[:, None]
    known = known.float().masked_fill(~mask[..., None], 0.0)  # what was never written may be NaN
    scores = torch.einsum("thd,tnd->thn", q.float(), known) * scale
    shares = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    return torch.einsum("thn,tnd->thd", shares, known).to(q.dtype).flatten(1)


def bound(ops: object, shape: Index, weights: IndexWeights | KeyPoolWeights) -> TokenIndex | PooledIndex:
    if isinstance(weights, KeyPoolWeights):
        return TorchPooledIndex(shape, weights)
    return TorchTokenIndex(shape, weights)
