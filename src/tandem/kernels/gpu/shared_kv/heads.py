"""`GpuSharedKvHeads`: decode steps by our kernels, prompts by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.config.mechanisms.shared_kv import EntryIndex, Pool, SharedKv
from tandem.kernels.gpu.chosen.best import keep_best
from tandem.kernels.gpu.chosen.scores import Keys, token_scores
from tandem.kernels.gpu.one_row import one_row
from tandem.kernels.gpu.shared_kv.attend import EntriesSeen, attend
from tandem.kernels.gpu.shared_kv.enter import Entered, close, enter
from tandem.kernels.shared_kv.heads import Projected, SharedKvHeads, plain_attend
from tandem.kernels.shared_kv.rows import StepRows
from tandem.kernels.shared_kv.weights import SharedKvWeights
from tandem.kernels.token_index import Chosen


class GpuSharedKvHeads(SharedKvHeads):
    """`SharedKvHeads` in bfloat16 or float32. Where every sequence has one row, nothing waits for the GPU."""

    def __init__(self, shape: SharedKv, weights: SharedKvWeights, groups: Tensor) -> None:
        """groups [G, rank, H * D / G], on the device."""
        super().__init__(shape, weights, plain_attend, lambda x: _grouped(x, groups))

    def __call__(self, p: Projected, rows: StepRows, ring: Tensor, pooled: tuple[Tensor, ...]) -> Tensor:
        if not rows.alone:
            return super().__call__(p, rows, ring, pooled)
        shape, weights, pool = self.shape, self.weights, self.shape.pool
        kept, pages = (pooled[0], pooled[1:]) if pooled else (None, ())
        entered = enter(p, rows, shape, weights, ring, kept)
        seen = None
        if pool is not None and kept is not None:
            close(rows, shape, pool, weights, kept, pages, entered.arrived)
            seen = self._entries_seen(entered, rows, pool, pages)
        out = attend(p.q, rows, shape, weights, ring, seen)
        return self._groups(out.view(len(out), shape.out_groups, -1)).flatten(1)

    def _entries_seen(
        self, entered: Entered, rows: StepRows, pool: Pool, pages: tuple[Tensor, ...]
    ) -> EntriesSeen:
        width = rows.tables.shape[1] * pages[0].shape[1]
        if pool.index is None or width <= pool.index.budget:
            return EntriesSeen(pages[0], None, width, pool.stride)
        chosen = _chosen(entered, rows, pool.index, pool.stride, pages[1])
        return EntriesSeen(pages[0], chosen, pool.index.budget, pool.stride)


def _chosen(asked: Entered, rows: StepRows, index: EntryIndex, stride: int, pages: Tensor) -> Tensor:
    """int32 [T, budget]: rows of the flattened pages, in their order, of which as many count as a row sees."""
    count, width = len(asked.q), rows.tables.shape[1] * pages.shape[1]
    last = rows.once(("last entry", stride), lambda: (rows.positions + 1) // stride - 1)
    tables = rows.once("int32 tables", rows.tables.int)
    keys = Keys(pages, tables, last, None)
    chosen = Chosen(
        asked.q.new_empty((count, index.budget), dtype=torch.int32),
        asked.q.new_empty(count, dtype=torch.int32),
    )
    scores = asked.weights.new_empty((count, width))
    token_scores(asked.q, asked.weights, keys, range(count), index, scores)
    keep_best(scores, keys, range(count), chosen)
    return chosen.rows


def _grouped(x: Tensor, groups: Tensor) -> Tensor:
    """[T, G, K] by each group's own matrix [rank, K] -> [T, G, rank]."""
    if len(x) == 1:
        return one_row(x[0].contiguous(), groups.flatten(0, 1), None, x.dtype).view(1, *groups.shape[:2])
    return torch.matmul(x.transpose(0, 1), groups.transpose(1, 2)).transpose(0, 1)
