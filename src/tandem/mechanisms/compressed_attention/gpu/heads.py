"""`GpuCompressedHeads`: compressed attention between its matrices; decoding and prompts have kernels of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.gpu.one_row import one_row
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepRows
from tandem.mechanisms.compressed_attention.gpu.append import append_rows, compress
from tandem.mechanisms.compressed_attention.gpu.attend import EntriesSeen, attend
from tandem.mechanisms.compressed_attention.gpu.prompt import attend_rows, turn_rows
from tandem.mechanisms.compressed_attention.shape import CompressedAttention, Compression, EntryIndex
from tandem.mechanisms.compressed_attention.torch import CompressedHeads, Projected, plain_attend
from tandem.mechanisms.compressed_attention.weights import CompressedWeights
from tandem.mechanisms.token_index.cost import SCORE_BYTES
from tandem.mechanisms.token_index.gpu.best import keep_best
from tandem.mechanisms.token_index.gpu.scores import ScoredKeys, token_scores


class GpuCompressedHeads(CompressedHeads):
    """`CompressedHeads` in bfloat16 or float32. Where every sequence has one row, nothing waits for the GPU."""

    def __init__(self, shape: CompressedAttention, weights: CompressedWeights, groups: Tensor) -> None:
        """groups [G, rank, H * D / G], on the device."""
        super().__init__(shape, weights, plain_attend, lambda x: _grouped(x, groups))

    def __call__(self, p: Projected, rows: StepRows, ring: Tensor, compressed_kv: tuple[Tensor, ...]) -> Tensor:
        attended = self._single_rows if rows.row_per_sequence else self._prompt
        out = attended(p, rows, ring, compressed_kv)
        return self._groups(out.view(len(out), self.shape.out_groups, -1)).flatten(1)

    def _single_rows(self, p: Projected, rows: StepRows, ring: Tensor, compressed_kv: tuple[Tensor, ...]) -> Tensor:
        """[T, H * D], of single rows."""
        shape, weights, compression = self.shape, self.weights, self.shape.compression
        input_ring, pages = (compressed_kv[0], compressed_kv[1:]) if compressed_kv else (None, ())
        index_query = append_rows(p, rows, shape, weights, ring, input_ring)
        entries = None
        if compression is not None and input_ring is not None:
            compress(rows, shape, compression, weights, input_ring, pages, index_query.arrived)
            entries = _entries_seen(_IndexQuery(index_query.q, index_query.weights), rows, compression, pages)
        return attend(p.q, rows, shape, weights, ring, entries)

    def _prompt(self, p: Projected, rows: StepRows, ring: Tensor, compressed_kv: tuple[Tensor, ...]) -> Tensor:
        """[T, H, D]. A ring has no room for all rows of a prompt beside those before, so they go there at the end."""
        shape, weights = self.shape, self.weights
        turn_rows(p.q.view(len(p.q), shape.heads, shape.dim), rows, weights)
        turn_rows(p.kv[:, None], rows, weights)
        entries = self._entries_of(p, rows, compressed_kv)
        out = attend_rows(p.q, p.kv, rows, shape, weights, ring, entries)
        rows.keep(ring, p.kv)
        return turn_rows(out, rows, weights, back=True)

    def _entries_of(self, p: Projected, rows: StepRows, compressed_kv: tuple[Tensor, ...]) -> EntriesSeen | None:
        """Entries that rows of prompts see, new ones included. None: nothing is compressed, or there are no inputs."""
        compression, inputs = self.shape.compression, p.inputs
        if compression is None or inputs is None:
            return None
        input_ring, pages, inputs = compressed_kv[0], compressed_kv[1:], inputs.contiguous()
        arrived = torch.zeros((len(inputs), 2), dtype=torch.int32, device=inputs.device)
        compress(rows, self.shape, compression, self.weights, input_ring, pages, arrived, inputs)
        rows.keep(input_ring, inputs)
        if p.index_q is None or p.index_weights is None or compression.index is None:
            return _entries_seen(None, rows, compression, pages)
        turn_rows(p.index_q.view(len(p.index_q), compression.index.heads, compression.index.dim), rows, self.weights)
        return _entries_seen(_IndexQuery(p.index_q, p.index_weights.float().contiguous()), rows, compression, pages)


class _IndexQuery(NamedTuple):
    """Query of an index: turned queries [T, Hi * Di], and weights of heads, float32 [T, Hi]."""

    q: Tensor
    weights: Tensor


def _entries_seen(
    query: _IndexQuery | None, rows: StepRows, compression: Compression, pages: tuple[Tensor, ...]
) -> EntriesSeen:
    """query: where there is an index."""
    width = rows.tables.shape[1] * pages[0].shape[1]
    if query is None or compression.index is None or width <= compression.index.budget:
        return EntriesSeen(pages[0], None, width, compression.stride)
    chosen = _chosen(query, rows, compression.index, compression.stride, pages[1])
    return EntriesSeen(pages[0], chosen, compression.index.budget, compression.stride)


def _chosen(query: _IndexQuery, rows: StepRows, index: EntryIndex, stride: int, pages: Tensor) -> Tensor:
    """int32 [T, budget]: rows of the flattened pages, in their order, of which as many count as a row sees."""
    count = len(query.q)
    last = rows.once(("last entry", stride), lambda: (rows.positions + 1) // stride - 1)
    tables = rows.once("int32 tables", rows.tables.int)
    owners = None if rows.row_per_sequence else rows.once("int32 sequences", rows.sequence.int)
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
