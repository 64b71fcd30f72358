"""`PieceAttention`: long chunks in cuDNN's attention, all others in our own kernels.

cuDNN reads keys and values that lie side by side, and plans each new shape. So they are gathered from pages in pieces
of few sizes. A chunk is a causal square at the end, and pieces of the tokens before it, which all its rows see; they
are added by their sums of exponentials. No graph can hold this: its lengths are Python's. Nor is it used while others
decode: its kernels are long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.attention import TritonAttention
from tandem.kernels.gpu.cudnn_attention.runs import SequenceRun, runs_of
from tandem.mechanisms.latent.gpu.prompt_kernels import Folded, gather
from tandem.spec.gpu_scratch import GQA_PIECE, GQA_ROUND, gqa_rows

_log = logging.getLogger(__name__)

PIECES = tuple(GQA_PIECE >> i for i in range(5))  # tokens: cuDNN plans a new shape for 60 ms
ROUND = GQA_ROUND

Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""q [t, H, D], k [n, G, D], v [n, G, E], scale, causal -> [t, H, E], and logs of sums of exponentials [H, t]."""


class Heads(NamedTuple):
    """Query heads, key heads; channels of a key, of a value."""

    heads: int
    kv_heads: int
    dim: int
    value: int


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """As `Attend`."""
    heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], len(q))


@cache
def attend_for(shape: Heads, device: torch.device) -> Attend | None:
    """cuDNN's where a trial shows that it takes such heads on this GPU."""
    if device.type != "cuda":
        return None
    sizes = (shape.heads, shape.dim), (shape.kv_heads, shape.dim), (shape.kv_heads, shape.value)
    q, k, v = (torch.zeros(ROUND, *size, dtype=torch.bfloat16, device=device) for size in sizes)
    try:
        for causal in (True, False):
            out, lse = cudnn_attention(q, k, v, 1.0, causal)
            assert out.shape == (ROUND, shape.heads, shape.value) and bool(lse.isfinite().all())
    except (RuntimeError, AssertionError, AttributeError) as error:
        _log.info("long prompts: Tandem's own attention kernel, cuDNN does not take these heads: %s", error)
        return None
    return cudnn_attention


class PieceAttention:
    """`AttentionBackend`. attend: whose kernel computes the pieces, by shape and device; None: ours computes all."""

    pausable = True

    def __init__(
        self, ours: TritonAttention, attend: Callable[[Heads, torch.device], Attend | None] = attend_for
    ) -> None:
        self._ours, self._attend_for = ours, attend
        self._runs: tuple[SequenceRun, ...] = ()
        self._rehearses = False

    def begin(self, batch: KernelBatch, captured: bool) -> None:
        """Plans a step; the plan counts until the next step that runs alone begins. Graphs of prompts are rehearsed
        without tokens: then cuDNN is tried, which takes two seconds the first time."""
        self._ours.begin(batch, captured)
        self._runs = () if captured else runs_of(batch)
        several = batch.positions.shape[0] > batch.seq_lens.shape[0]  # rows of one: not before a decode step's graph
        self._rehearses = captured and several and not batch.seq_lens.any()

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: KernelBatch,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attend = None
        if (self._runs or self._rehearses) and not window and sinks is None:
            attend = self._attend_for(Heads(q.shape[1], k_pages.shape[2], q.shape[2], v_pages.shape[3]), q.device)
        if attend is None or not self._runs:
            return self._ours(q, k_pages, v_pages, batch, scale, window, sinks)
        parts = [self._run(run, attend, q, (k_pages, v_pages), batch, scale) for run in self._runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(
        self,
        run: SequenceRun,
        attend: Attend,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        batch: KernelBatch,
        scale: float,
    ) -> Tensor:
        if run.before is None:
            return self._ours(q[run.rows], *pages, _part(batch, run), scale, 0)
        table = batch.block_tables[run.sequences.start]
        return ChunkAttention(attend, (*pages, table), scale)(q[run.rows], run.before)


def _part(batch: KernelBatch, run: SequenceRun) -> KernelBatch:
    """Layout of the sequences of a run, which are not whole steps."""
    first, last = run.sequences.start, run.sequences.stop
    starts = batch.query_starts[first : last + 1]
    layout: Any = batch
    return cast(KernelBatch, replace(
        layout, positions=batch.positions[run.rows], cache_slots=batch.cache_slots[run.rows], turns=None,
        query_starts=starts - run.rows.start, seq_lens=batch.seq_lens[run.sequences],
        block_tables=batch.block_tables[run.sequences], slots=batch.slots[run.sequences],
        single_rows=max(0, min(batch.single_rows, last) - first),
    ))  # fmt: skip


class AttentionPieces(NamedTuple):
    """Rows after tokens of which `pieces` are whole pieces, up to `begin`. The `skipped` tokens that follow are no
    piece: a causal square of `size` tokens takes them, too, as rows that nobody looks at. rows: that all pieces see,
    rounded up."""

    begin: int
    skipped: int
    size: int
    rows: int
    pieces: tuple[tuple[int, int], ...]


def chunk_of(before: int, rows: int) -> AttentionPieces:
    """Chunk of `rows` rows after `before` tokens."""
    begin, pieces = 0, []
    for size in PIECES:
        while begin + size <= before:
            pieces.append((begin, begin + size))
            begin += size
    skipped = before - begin
    return AttentionPieces(begin, skipped, _rounded(skipped + rows), _rounded(rows), tuple(pieces))


def _rounded(rows: int) -> int:
    return -(-rows // ROUND) * ROUND


class ChunkAttention:
    """One chunk's attention. pages: of keys, of values, and the sequence's table."""

    def __init__(self, attend: Attend, pages: tuple[Tensor, Tensor, Tensor], scale: float) -> None:
        self._attend, self._pages, self._scale = attend, pages, scale

    def __call__(self, q: Tensor, before: int) -> Tensor:
        """q [t, H, D] after so many tokens -> [t, H * E]."""
        each = gqa_rows(q.shape[1], q.shape[2], self._pages[1].shape[3])
        parts = [
            self._some(part, chunk_of(before + i * each, len(part))) for i, part in enumerate(q.split(each))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _some(self, q: Tensor, chunk: AttentionPieces) -> Tensor:
        own, sums = self._square(q, chunk)
        if not chunk.pieces:
            return own.flatten(1)
        out, queries = q.new_empty((len(q), own.shape[1] * own.shape[2])), _placed(q, 0, chunk.rows)
        folded = Folded(out, q.shape[1], 1 + len(chunk.pieces))
        folded.add(own, sums)
        for begin, end in chunk.pieces:
            keys = self._keys_values(begin, end, end, q.dtype)
            part, sums = self._attend(queries, *keys, self._scale, False)
            folded.add(part[: len(q)], sums[:, : len(q)])
        return out

    def _square(self, q: Tensor, chunk: AttentionPieces) -> tuple[Tensor, Tensor]:
        """Attention to the tokens that are in no piece, and its sums."""
        rows = slice(chunk.skipped, chunk.skipped + len(q))
        keys = self._keys_values(chunk.begin, chunk.begin + rows.stop, chunk.begin + chunk.size, q.dtype)
        own, sums = self._attend(_placed(q, chunk.skipped, chunk.size), *keys, self._scale, True)
        return own[rows], sums[:, rows]

    def _keys_values(self, begin: int, last: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of positions begin … last - 1, then zeros up to `end`: [end - begin, G, D] and [.., G, E]."""
        *kinds, table = self._pages
        keys, values = (
            gather(pages.flatten(2)[:, :, None], table, begin, last, end - begin)
            .view(end - begin, *pages.shape[2:])
            .to(dtype)
            for pages in kinds
        )
        return keys, values


def _placed(q: Tensor, first: int, rows: int) -> Tensor:
    """Queries as rows `first` ... of so many; nobody looks at the others."""
    if len(q) == rows:
        return q
    queries = q.new_zeros((rows, *q.shape[1:]))
    queries[first : first + len(q)] = q
    return queries
