"""Chunks of many rows: keys and values of each head are made from the latents, in pieces of bounded size.

Attention over 192 and 128 channels takes less than a third of the products of its absorbed form over 576 and 512. It
runs in cuDNN where PyTorch offers that for such heads, else in a Triton kernel of ours. A chunk on a cached prefix is a
causal square at the end and pieces of the prefix, which all rows see; they are added by their sums of exponentials.
Lengths are rounded up, because cuDNN plans every new shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.mechanisms.latent.absorbed import LatentSizes, LatentWeights
from tandem.mechanisms.latent.cost import PIECE, head_bytes
from tandem.mechanisms.latent.gpu.prompt_kernels import Folded, attended, gather, join
from tandem.mechanisms.latent.gpu.turn import spread
from tandem.spec.gpu_scratch import HEAD_BYTES, ROUND_KEYS, ROUND_ROWS, SQUARE

_log = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, float, bool, LatentSizes], tuple[Tensor, Tensor]]
"""As `prompt_kernels.attended`."""


class LatentChunk(NamedTuple):
    """Rows of one sequence: `rows` of the step's from row `first` on, after `before` tokens that are cached."""

    sequence: int
    first: int
    rows: int
    before: int


class Square(NamedTuple):
    """A causal square over keys begin … begin + size - 1, whose last real row is `last - 1`; before it whole pieces.

    `pieces_first`: the row of the square from which on the pieces are computed.
    """

    begin: int
    size: int
    skipped: int
    rows: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def pieces_first(self) -> int:
        return self.skipped // ROUND_ROWS * ROUND_ROWS


def square_of(before: int, rows: int) -> Square:
    """The square of `rows` new tokens after `before` others. It also takes the tokens before them that are no whole
    piece, as rows that nobody looks at."""
    begin = before // ROUND_KEYS * ROUND_KEYS
    skipped = before - begin
    size = -(-(skipped + rows) // ROUND_ROWS) * ROUND_ROWS
    pieces = tuple((at, min(at + PIECE, begin)) for at in range(0, begin, PIECE))
    return Square(begin, size, skipped, rows, pieces)


def cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, sizes: LatentSizes
) -> tuple[Tensor, Tensor]:
    """As `attended`."""
    heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], len(q))


@cache
def attention_for(sizes: LatentSizes, device: torch.device) -> Attend:
    """cuDNN's where a trial shows that it takes such heads on this GPU."""
    if device.type != "cuda":
        return attended
    shapes = (sizes.nope + sizes.rope, sizes.nope + sizes.rope, sizes.nope + sizes.value)
    q, k, kv = (torch.zeros(ROUND_ROWS, 2, n, dtype=torch.bfloat16, device=device) for n in shapes)
    try:
        for causal in (True, False):
            out, lse = cudnn_attention(q, k, kv[..., sizes.nope :], 1.0, causal, sizes)
            assert out.shape == (ROUND_ROWS, 2, sizes.value) and bool(lse.isfinite().all())
    except (RuntimeError, AssertionError, AttributeError) as error:
        _log.info("prompts: Tandem's own attention kernel, cuDNN does not take these heads: %s", error)
        return attended
    return cudnn_attention


class Prompts:
    """Attention of a layer's chunks of many rows. up [H, nope + value, rank]: W_K and W_V of each head."""

    def __init__(self, sizes: LatentSizes, weights: LatentWeights, up: Tensor) -> None:
        self._sizes, self._weights, self._up = sizes, weights, up
        self._attend = attention_for(sizes, up.device)

    def __call__(
        self, q: Tensor, positions: Tensor, pages: tuple[Tensor, Tensor], chunk: LatentChunk, out: Tensor
    ) -> None:
        """q [T, H, nope + rope] of a step, before the rotation, to rows of out [T, H * value]; positions [T]; pages:
        latents, which hold the chunk's own already, and the tables of all sequences."""
        latents, table = pages[0], pages[1][chunk.sequence]
        for start in range(0, chunk.rows, SQUARE):
            rows = min(SQUARE, chunk.rows - start)
            query_rows = slice(chunk.first + start, chunk.first + start + rows)
            square = square_of(chunk.before + start, rows)
            for heads in self._groups(square):
                target = out[query_rows, heads.start * self._sizes.value : heads.stop * self._sizes.value]
                self._some_heads(q[query_rows, heads], positions[query_rows], (latents, table), square, heads, target)

    def _some_heads(
        self,
        q: Tensor,
        positions: Tensor,
        pages: tuple[Tensor, Tensor],
        square: Square,
        heads: slice,
        out: Tensor,
    ) -> None:
        scale, at = self._weights.scale, square.skipped
        turned = spread(q, positions, at, square.size, self._sizes, self._weights)
        sums = Folded(out, q.shape[1], 1 + len(square.pieces))
        for begin, end in square.pieces:
            k, v = self._keys_values(pages, begin, end, end - begin, heads)
            part, lse = self._attend(turned[square.pieces_first :], k, v, scale, False, self._sizes)
            first = at - square.pieces_first
            sums.add(part[first : first + square.rows], lse[:, first : first + square.rows])
        k, v = self._keys_values(pages, square.begin, square.begin + at + square.rows, square.size, heads)
        part, lse = self._attend(turned, k, v, scale, True, self._sizes)
        sums.add(part[at : at + square.rows], lse[:, at : at + square.rows])

    def _keys_values(
        self, pages: tuple[Tensor, Tensor], begin: int, end: int, rows: int, heads: slice
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of positions begin … end - 1, and zeros up to `rows`: [rows, G, nope + rope], [rows, G,
        value]."""
        s = self._sizes
        latents = gather(*pages, begin, end, rows)
        up = self._up[heads]
        both = F.linear(latents[:, s.rope :], up.flatten(0, 1)).view(rows, len(up), s.nope + s.value)
        return join(both[..., : s.nope], latents[:, : s.rope]), both[..., s.nope :]

    def _groups(self, square: Square) -> Iterator[slice]:
        """As many heads at a time as have room."""
        longest = max([square.size, *(end - begin for begin, end in square.pieces)])
        s = self._sizes
        group = max(1, HEAD_BYTES // head_bytes(s.nope, s.rope, s.value, square.size, longest))
        for first in range(0, s.heads, group):
            yield slice(first, min(first + group, s.heads))
