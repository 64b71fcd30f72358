"""`GpuSharedKvHeads`: shared keys between their matrices, by kernels for steps that decode and others for prompts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.gpu.one_row import one_row
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepRows
from tandem.mechanisms.shared_kv.gpu.attend import EntriesSeen, attend
from tandem.mechanisms.shared_kv.gpu.enter import close, enter
from tandem.mechanisms.shared_kv.gpu.prompt import attend_rows, turn_rows
from tandem.mechanisms.shared_kv.shape import EntryIndex, Pool, SharedKv
from tandem.mechanisms.shared_kv.torch import Projected, SharedKvHeads, plain_attend
from tandem.mechanisms.shared_kv.weights import SharedKvWeights
from tandem.mechanisms.token_index.cost import SCORE_BYTES
from tandem.mechanisms.token_index.gpu.best import keep_best
from tandem.mechanisms.token_index.gpu.scores import ScoredKeys, token_scores


class GpuSharedKvHeads(SharedKvHeads):
    """`SharedKvHeads` in bfloat16 or float32. Where every sequence has one row, nothing waits for the GPU."""

    def __init__(self, shape: SharedKv, weights: SharedKvWeights, groups: Tensor) -> None:
        """groups [G, rank, H * D / G], on the device."""
        super().__init__(shape, weights, plain_attend, lambda x: _grouped(x, groups))

    def __call__(self, p: Projected, rows: StepRows, ring: Tensor, pooled: tuple[Tensor, ...]) -> Tensor:
        attended = self._alone if rows.alone else self._prompt
        out = attended(p, rows, ring, pooled)
        return self._groups(out.view(len(out), self.shape.out_groups, -1)).flatten(1)

    def _alone(self, p: Projected, rows: StepRows, ring: Tensor, pooled: tuple[Tensor, ...]) -> Tensor:
        """[T, H * D], of single rows."""
        shape, weights, pool = self.shape, self.weights, self.shape.pool
        input_ring, pages = (pooled[0], pooled[1:]) if pooled else (None, ())
        entered = enter(p, rows, shape, weights, ring, input_ring)
        entries = None
        if pool is not None and input_ring is not None:
            close(rows, shape, pool, weights, input_ring, pages, entered.arrived)
            entries = _entries_seen(_IndexQuery(entered.q, entered.weights), rows, pool, pages)
        return attend(p.q, rows, shape, weights, ring, entries)

    def _prompt(self, p: Projected, rows: StepRows, ring: Tensor, pooled: tuple[Tensor, ...]) -> Tensor:
        """[T, H, D]. A ring has no room for all rows of a prompt beside those before, so they go there at the end."""
        shape, weights = self.shape, self.weights
        turn_rows(p.q.view(len(p.q), shape.heads, shape.dim), rows, weights)
        turn_rows(p.kv[:, None], rows, weights)
        entries = self._entries_of(p, rows, pooled)
        out = attend_rows(p.q, p.kv, rows, shape, weights, ring, entries)
        rows.keep(ring, p.kv)
        return turn_rows(out, rows, weights, back=True)

    def _entries_of(self, p: Projected, rows: StepRows, pooled: tuple[Tensor, ...]) -> EntriesSeen | None:
        """Entries that rows of prompts see, the new ones among them. None: there is no pool, or no inputs."""
        pool, inputs = self.shape.pool, p.inputs
        if pool is None or inputs is None:
            return None
        input_ring, pages, inputs = pooled[0], pooled[1:], inputs.contiguous()
        arrived = torch.zeros((len(inputs), 2), dtype=torch.int32, device=inputs.device)
        close(rows, self.shape, pool, self.weights, input_ring, pages, arrived, inputs)
        rows.keep(input_ring, inputs)
        if p.index_q is None or p.index_weights is None or pool.index is None:
            return _entries_seen(None, rows, pool, pages)
        turn_rows(p.index_q.view(len(p.index_q), pool.index.heads, pool.index.dim), rows, self.weights)
        return _entries_seen(_IndexQuery(p.index_q, p.index_weights.float().contiguous()), rows, pool, pages)


class _IndexQuery(NamedTuple):
    """Query of an index: turned queries [T, Hi * Di], and weights of heads, float32 [T, Hi]."""

    q: Tensor
    weights: Tensor


def _entries_seen(query: _IndexQuery | None, rows: StepRows, pool: Pool, pages: tuple[Tensor, ...]) -> EntriesSeen:
    """query: where there is an index."""
    width = rows.tables.shape[1] * pages[0].shape[1]
    if query is None or pool.index is None or width <= pool.index.budget:
        return EntriesSeen(pages[0], None, width, pool.stride)
    chosen = _chosen(query, rows, pool.index, pool.stride, pages[1])
    return EntriesSeen(pages[0], chosen, pool.index.budget, pool.stride)


def _chosen(query: _IndexQuery, rows: StepRows, index: EntryIndex, stride: int, pages: Tensor) -> Tensor:
    """int32 [T, budget]: rows of the flattened pages, in their order, of which as many count as a row sees."""
    count = len(query.q)
    last = rows.once(("last entry", stride), lambda: (rows.positions + 1) // stride - 1)
    tables = rows.once("int32 tables", rows.tables.int)
    owners = None if rows.alone else rows.once("int32 sequences", rows.sequence.int)
    keys = ScoredKeys(pages, tables, last, owners)
    chosen = SelectedKeys(
        query.q.new_empty((count, index.budget), dtype=torch.int32),
        query.q.new_empty(count, dtype=torch.int32),
    )
    each = max(1, SCORE_BYTES // (4 * keys.width))
    for first in range(0, count, each):
        some = range(first, min(first + each, count))
        scores = query.weights.new_empty((len(some), keys.width))
        token_scores(query.q, query.weights, keys, some, index, scores)
        keep_best(scores, keys, some, chosen)
    return chosen.rows


def _grouped(x: Tensor, groups: Tensor) -> Tensor:
    """[T, G, K] by each group's own matrix [rank, K] -> [T, G, rank]."""
    if len(x) == 1:
        return one_row(x[0].contiguous(), groups.flatten(0, 1), None, x.dtype).view(1, *groups.shape[:2])
    return torch.matmul(x.transpose(0, 1), groups.transpose(1, 2)).transpose(0, 1)
