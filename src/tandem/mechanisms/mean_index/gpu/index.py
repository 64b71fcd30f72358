"""`GpuMeanIndex`: blocks of tokens whose key is the mean of theirs, on a GPU, inside CUDA graphs too.

A token's key waits in a ring as it came, until the last of its block comes. The ring has no room for all rows of a
prompt beside those before, so those go there at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.attention_decode import decode
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepContext, StepRows
from tandem.mechanisms.mean_index.rows import as_sequences
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.mean_index.torch import MeanWeights
from tandem.mechanisms.token_index.gpu.pooled import token_places
from tandem.mechanisms.token_index.gpu.pools import Pools, chosen_tokens
from tandem.mechanisms.token_index.pooled import PooledKeys
from tandem.spec.gpu_scratch import DECODED_ROWS


@triton.jit
def _partner(d, HALF: tl.constexpr):
    """The channel that each turns with; past 2 * HALF itself."""
    return tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))


@triton.jit
def _write_turned(x, partner, norm, to, cos, sin, eps, d, DIM: tl.constexpr, HALF: tl.constexpr):
    """x of channels d and of those that they turn with, normed and turned as halves, rounded where torch rounds. cos,
    sin: of its position."""
    kind: tl.constexpr = to.dtype.element_ty
    inside, turned, i = d < DIM, d < 2 * HALF, tl.where(d < HALF, d, d - HALF)
    unit = tl.rsqrt(tl.sum(x * x) / DIM + eps)
    own = (x * unit * tl.load(norm + d, inside, other=0.0)).to(kind).to(tl.float32)
    other = (partner * unit * tl.load(norm + _partner(d, HALF), inside, other=0.0)).to(kind).to(tl.float32)
    c = tl.load(cos + i, turned, other=1.0).to(kind).to(tl.float32)
    s = tl.load(sin + i, turned, other=0.0).to(kind).to(tl.float32)
    own, other = (own * c).to(kind).to(tl.float32), (other * s).to(kind).to(tl.float32)
    y = tl.where(turned & (d < HALF), own - other, own + other)
    tl.store(to + d, y.to(kind), inside)


@triton.jit
def _enter(q, k, out, ring, norm, cos, sin, positions, slots, ring_slot, eps, HEADS: tl.constexpr, DIM: tl.constexpr,
           HALF: tl.constexpr, PLACES: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    """A head of a row's queries, normed and turned; with KEPT the last program's key goes into its ring."""
    h, t, d = tl.program_id(1), tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    begin(OVERLAP)
    position = tl.load(positions + t)
    if h < HEADS:
        at = (t * HEADS + h) * DIM
        x = tl.load(q + at + d, d < DIM, other=0.0).to(tl.float32)
        partner = tl.load(q + at + _partner(d, HALF), d < DIM, other=0.0).to(tl.float32)
        _write_turned(x, partner, norm, out + at, cos + position * HALF, sin + position * HALF, eps, d, DIM, HALF)
    elif KEPT:
        place = ring + tl.load(slots + t) * ring_slot + position % PLACES * DIM
        tl.store(place + d, tl.load(k + t * DIM + d, d < DIM, other=0.0), d < DIM)


@triton.jit
def _close_means(ring, fresh, norm, out, cos, sin, positions, sequences, slots, begins, firsts, cache_slots, ring_slot,
                 eps, DIM: tl.constexpr, HALF: tl.constexpr, POOL: tl.constexpr, PLACES: tl.constexpr,
                 TOKENS: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """The key of the block that ends with a row, turned as its first token is."""
    begin(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    if (position + 1) % POOL != 0:
        return
    at = token_places(ring, fresh, positions, sequences, slots, begins, firsts, ring_slot, t, POOL, DIM, PLACES, TOKENS,
                      SINGLE)  # fmt: skip
    r, d = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    inside = (r < POOL)[:, None] & (d < DIM)[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    total = tl.sum(tl.load(at[:, None] + d[None, :], inside, other=0.0).to(tl.float32), 0)
    others = tl.sum(tl.load(at[:, None] + _partner(d, HALF)[None, :], inside, other=0.0).to(tl.float32), 0)
    mean, partner = (total / POOL).to(kind).to(tl.float32), (others / POOL).to(kind).to(tl.float32)
    angle, to = (position - (POOL - 1)) * HALF, out + tl.load(cache_slots + t) // POOL * DIM
    _write_turned(mean, partner, norm, to, cos + angle, sin + angle, eps, d, DIM, HALF)


class GpuMeanIndex:
    """`ChooseBlocks` in bfloat16 or float32."""

    def __init__(self, shape: MeanIndex, weights: MeanWeights) -> None:
        self._shape, self._weights = shape, weights
        self._pools = Pools(shape.heads, shape.dim, shape.budget // shape.pool, shape.pool)

    def __call__(self, q: Tensor, k: Tensor, step: StepContext, cache: PooledKeys) -> SelectedKeys | None:
        """As `ChooseBlocks`."""
        rows, heads = step.rows, self._shape.heads
        turned = self._entered(q.contiguous(), k.contiguous(), rows, cache)
        gates = rows.once(("ones", heads), lambda: torch.ones((len(q), heads), device=q.device))
        return chosen_tokens(turned, gates, step, cache, self._pools)

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, chosen: SelectedKeys, scale: float) -> Tensor:
        """As `ChooseBlocks`: rows are sequences that decode, DECODED_ROWS at a time."""
        q, k, v, layout = as_sequences(q.contiguous(), k_pages, v_pages, chosen)
        out = q.new_empty((len(q), q.shape[1] * v.shape[3]))
        for first in range(0, len(q), DECODED_ROWS):
            decode(q, (k, v), layout, (scale, 0, None), slice(first, min(first + DECODED_ROWS, len(q))), out)
        return out

    def _entered(self, q: Tensor, k: Tensor, rows: StepRows, cache: PooledKeys) -> Tensor:
        """Queries as they meet keys; keys are kept, and those of blocks closed."""
        s, w, ring = self._shape, self._weights, cache.ring
        out, block = torch.empty_like(q), triton.next_power_of_2(s.dim)
        sizes = {"DIM": s.dim, "HALF": w.cos.shape[1], "PLACES": ring.shape[1], "BLOCK": block, **overlapped(q.device)}
        _enter[(len(q), s.heads + int(rows.row_per_sequence))](
            q, k, out, ring, w.query, w.cos, w.sin, rows.positions, rows.slots, ring.stride(0), s.norm.eps,
            HEADS=s.heads, KEPT=rows.row_per_sequence, num_warps=1, **sizes,
        )  # fmt: skip
        _close_means[(len(q),)](
            ring, k, w.key, cache.keys, w.cos, w.sin, rows.positions, rows.sequence, rows.slots, rows.begins,
            rows.first, rows.cache_slots, ring.stride(0), s.norm.eps, POOL=s.pool,
            TOKENS=triton.next_power_of_2(s.pool), SINGLE=rows.row_per_sequence, num_warps=1, **sizes,
        )  # fmt: skip
        if not rows.row_per_sequence:
            rows.keep(ring, k)
        return out
