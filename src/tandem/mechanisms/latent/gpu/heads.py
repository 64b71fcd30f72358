"""`GpuLatentHeads`: latent attention between its matrices on a GPU.

Rows that decode, and chunks of few rows, ask the latents themselves (`decode.py`): five kernels a layer, inside CUDA
graphs too. For chunks of many rows keys and values of each head are made anew (`prompt.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_lengths import lengths_of
from tandem.mechanisms.latent.absorbed import LatentSizes, LatentWeights
from tandem.mechanisms.latent.gpu.decode import LatentPages, decode, hopper_kernel, parts_of, tile_of
from tandem.mechanisms.latent.gpu.per_head import per_head
from tandem.mechanisms.latent.gpu.prompt import LatentChunk, Prompts
from tandem.mechanisms.latent.gpu.turn import NewKeys, turn

FEW_ROWS = 64  # of a chunk: making its keys and values anew would take longer
MANY_ROWS = 256  # of a chunk that choose their tokens, at a time; nothing of a row is divided then


class GpuLatentHeads:
    """`LatentHeads` in bfloat16 or float32."""

    def __init__(
        self,
        sizes: LatentSizes,
        weights: LatentWeights,
        dtype: torch.dtype,
        device: torch.device,
        fixed: bool = False,
    ) -> None:
        """fixed: a row has the same bits beside any others."""
        both = torch.cat((weights.keys.transpose(1, 2), weights.values), 1)
        self._up = both.to(device, dtype).contiguous()  # [H, nope + value, rank], as checkpoints have it
        self._sizes = sizes
        self._weights = weights._replace(keys=self._up[:, : sizes.nope], values=self._up[:, sizes.nope :])
        self._prompts = Prompts(sizes, self._weights, self._up)
        self._parts = parts_of(sizes, tile_of(device, sizes)) if fixed else 0
        hopper_kernel(device, sizes)  # tried before a graph is captured

    def __call__(
        self, q: Tensor, kv: Tensor, batch: KernelBatch, pages: Tensor, chosen: SelectedKeys | None = None
    ) -> Tensor:
        s, rows, sequences = self._sizes, len(q), len(batch.seq_lens)
        q, kv = q.view(rows, s.heads, s.nope + s.rope), kv.contiguous()
        out = q.new_empty((rows, s.heads * s.value))
        single = sequences if rows == sequences else batch.single_rows
        new = NewKeys(kv, pages, batch.cache_slots)
        x = turn(q[:single], batch.positions, s, self._weights, new)
        key_pages = LatentPages(pages, batch.block_tables, batch.seq_lens)
        if chosen is not None:
            key_pages = _chosen_pages(pages, chosen, slice(0, single))
        self._ask(q[:single], x, key_pages, out[:single])
        for few, chunks in _by_length(chunks_of(batch, single) if single < sequences else []):
            if few:
                self._few_rows(q, batch, pages, chunks, out, chosen)
                continue
            for chunk in chunks:
                self._many_rows(q, batch, pages, chunk, out, chosen)
        return out

    def _ask(self, q: Tensor, x: Tensor, pages: LatentPages, out: Tensor, parts: int = 0) -> None:
        """In absorbed form: q [t, H, nope + rope], x as `turn` makes it, to out [t, H * value]; parts: of `decode`."""
        s, w = self._sizes, self._weights
        if len(q):
            per_head(q[..., : s.nope], w.keys, x[..., s.rope :], flipped=True)
            per_head(
                decode(x, pages, s, w.scale, parts or self._parts),
                w.values,
                out.view(len(q), s.heads, s.value),
            )

    def _few_rows(
        self,
        q: Tensor,
        batch: KernelBatch,
        pages: Tensor,
        chunks: list[LatentChunk],
        out: Tensor,
        chosen: SelectedKeys | None,
    ) -> None:
        """Chunks of neighbours: each row asks all keys up to its own, or those chosen, as if it decoded."""
        rows = slice(chunks[0].first, chunks[-1].first + chunks[-1].rows)
        positions = batch.positions[rows]
        if chosen is not None:
            key_pages = _chosen_pages(pages, chosen, rows)
        else:
            owners = torch.tensor([chunk.sequence for chunk in chunks for _ in range(chunk.rows)]).to(
                q.device
            )
            key_pages = LatentPages(pages, batch.block_tables[owners], (positions + 1).int())
        self._ask(q[rows], turn(q[rows], positions, self._sizes, self._weights), key_pages, out[rows])

    def _many_rows(
        self, q: Tensor, batch: KernelBatch, pages: Tensor, chunk: LatentChunk, out: Tensor, chosen: SelectedKeys | None
    ) -> None:
        """Rows that see all tokens before them, then those that ask their chosen ones."""
        full_rows = chunk.rows
        if chosen is not None:
            full_rows = min(chunk.rows, max(0, chosen.rows.shape[1] - chunk.before))
        if full_rows:
            first = chunk._replace(rows=full_rows)
            self._prompts(q, batch.positions, (pages, batch.block_tables), first, out)
        if chosen is None:
            return
        for start in range(chunk.first + full_rows, chunk.first + chunk.rows, MANY_ROWS):
            rows = slice(start, min(start + MANY_ROWS, chunk.first + chunk.rows))
            x = turn(q[rows], batch.positions[rows], self._sizes, self._weights)
            self._ask(q[rows], x, _chosen_pages(pages, chosen, rows), out[rows], parts=1)


def _chosen_pages(pages: Tensor, chosen: SelectedKeys, rows: slice) -> LatentPages:
    return LatentPages(pages.view(-1, 1, 1, pages.shape[3]), chosen.rows[rows], chosen.counts[rows])


def _by_length(chunks: list[LatentChunk]) -> Iterator[tuple[bool, list[LatentChunk]]]:
    """Neighbours of few rows, or of many, together."""
    for few, some in groupby(chunks, lambda chunk: chunk.rows <= FEW_ROWS):
        yield few, list(some)


def chunks_of(batch: KernelBatch, first: int) -> list[LatentChunk]:
    """Sequences from `first` on."""
    _, starts, ends = lengths_of(batch)
    each = ((s, starts[s], starts[s + 1] - starts[s]) for s in range(first, len(ends)))
    return [LatentChunk(s, row, rows, ends[s] - rows) for s, row, rows in each if rows]
