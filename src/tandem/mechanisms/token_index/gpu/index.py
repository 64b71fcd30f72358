"""`GpuTokenIndex`: which tokens each row attends to, on a GPU, inside CUDA graphs too."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_lengths import lengths_of
from tandem.mechanisms.token_index.cost import SCORE_BYTES
from tandem.mechanisms.token_index.gpu.best import keep_best
from tandem.mechanisms.token_index.gpu.scores import ScoredKeys, Scoring, token_scores
from tandem.mechanisms.token_index.gpu.turn import TurnPlaces, turn_index
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights


class GpuTokenIndex:
    """`TokenIndex` in bfloat16 or float32."""

    def __init__(self, shape: Index, weights: IndexWeights) -> None:
        self._shape, self._weights = shape, weights

    def __call__(self, q: Tensor, k: Tensor, gates: Tensor, batch: KernelBatch, pages: Tensor) -> SelectedKeys | None:
        places = TurnPlaces(batch.positions, batch.cache_slots)
        turned = turn_index(q, k, pages, places, self._shape, self._weights)
        if not self._binds(batch, len(q), pages.shape[1]):
            return None
        keys = ScoredKeys(pages, batch.block_tables, batch.positions, _owners(batch, len(q)))
        return chosen_keys(turned, gates, keys, self._shape)

    def _binds(self, batch: KernelBatch, rows: int, page: int) -> bool:
        """Whether any row may see more tokens than it chooses. Rows that decode may be in a graph, which is replayed
        for longer sequences: as many as their tables have room for."""
        if batch.block_tables.shape[1] * page <= self._shape.budget:
            return False
        return rows == len(batch.seq_lens) or max(lengths_of(batch).ends) > self._shape.budget


def chosen_keys(q: Tensor, gates: Tensor, keys: ScoredKeys, shape: Scoring) -> SelectedKeys:
    """Best `shape.budget` keys of each row, by queries q [T, heads * dim], turned, and gates float32 [T, heads]: as
    many rows at a time as their scores have room."""
    count = len(q)
    chosen = SelectedKeys(*(q.new_empty(size, dtype=torch.int32) for size in ((count, shape.budget), (count,))))
    each = max(1, SCORE_BYTES // (4 * keys.width))
    for first in range(0, count, each):
        rows = range(first, min(first + each, count))
        scores = gates.new_empty((len(rows), keys.width))
        token_scores(q, gates, keys, rows, shape, scores)
        keep_best(scores, keys, rows, chosen)
    return chosen


def _owners(batch: KernelBatch, rows: int) -> Tensor | None:
    """The sequence of each row, int32 [T]; None: each its own."""
    if rows == len(batch.seq_lens):
        return None
    counted = torch.arange(rows, dtype=torch.int32, device=batch.query_starts.device)
    return torch.searchsorted(batch.query_starts[1:], counted, right=True, out_int32=True)
