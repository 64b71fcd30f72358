"""`GpuPooledIndex`: keys of several tokens each, on a GPU, inside CUDA graphs too.

A token's key and gates wait in a ring until the last of its pool comes. The ring has no room for all rows of a prompt
beside those before, so those go there at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepContext, StepRows
from tandem.mechanisms.token_index.gpu.pools import Pools, chosen_tokens
from tandem.mechanisms.token_index.pooled import KeyPoolWeights, PooledKeys
from tandem.mechanisms.token_index.shape import Index


@triton.jit
def _enter(raw, fresh, ring, norm, bias, positions, slots, ring_slot, eps, DIM: tl.constexpr, PLACES: tl.constexpr,
           KEPT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A row's key, normed, and its gates as they came; KEPT: into its sequence's ring, too."""
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    w, b = tl.load(norm + d, inside, other=0.0), tl.load(bias + d, inside, other=0.0)
    begin(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = fresh.dtype.element_ty
    x = tl.load(raw + t * 2 * DIM + d, inside, other=0.0).to(tl.float32)
    gates = tl.load(raw + (t * 2 + 1) * DIM + d, inside, other=0.0)
    centred = tl.where(inside, x - tl.sum(x) / DIM, 0.0)
    key = (centred * tl.rsqrt(tl.sum(centred * centred) / DIM + eps) * w + b).to(kind)
    tl.store(fresh + t * 2 * DIM + d, key, inside)
    tl.store(fresh + (t * 2 + 1) * DIM + d, gates, inside)
    if KEPT:
        place = ring + tl.load(slots + t) * ring_slot + tl.load(positions + t) % PLACES * 2 * DIM
        tl.store(place + d, key, inside)
        tl.store(place + DIM + d, gates, inside)


@triton.jit
def token_places(ring, fresh, positions, sequences, slots, begins, firsts, ring_slot, t, POOL: tl.constexpr,
                 WIDTH: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """[TOKENS] pointers to the tokens of the pool that ends with row t, WIDTH numbers each; the first POOL count.
    SINGLE: each row is a sequence, and what it made is in the ring; else that of the step's rows is fresh."""
    r, position = tl.arange(0, TOKENS), tl.load(positions + t)
    token = position - (POOL - 1) + tl.where(r < POOL, r, 0)
    sequence = t if SINGLE else tl.load(sequences + t)
    old = ring + tl.load(slots + sequence) * ring_slot + token % PLACES * WIDTH
    if SINGLE:
        return old
    since = tl.load(firsts + sequence)
    new = fresh + (tl.load(begins + sequence) + token - since) * WIDTH
    return tl.where(token < since, old, new)


@triton.jit
def _close(ring, fresh, places, out, positions, sequences, slots, begins, firsts, cache_slots, ring_slot,
           DIM: tl.constexpr, POOL: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr, SINGLE: tl.constexpr,
           BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """The key of the pool that ends with a row: weights of its tokens' keys are rounded as keys are."""
    begin(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    if (tl.load(positions + t) + 1) % POOL != 0:
        return
    at = token_places(ring, fresh, positions, sequences, slots, begins, firsts, ring_slot, t, POOL, 2 * DIM, PLACES,
                      TOKENS, SINGLE)  # fmt: skip
    r, d = tl.arange(0, TOKENS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (r < POOL) & (d < DIM)
    kind: tl.constexpr = out.dtype.element_ty
    keys = tl.load(at[:, None] + d, inside, other=0.0).to(tl.float32)
    gates = tl.load(at[:, None] + DIM + d, inside, other=0.0).to(tl.float32)
    gates = tl.where(inside, gates + tl.load(places + r * DIM + d, inside, other=0.0), float("-inf"))
    top = tl.max(gates, 0)
    shares = tl.exp(gates - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(shares, 0)
    shares = (shares / tl.where(total > 0, total, 1.0)[None, :]).to(kind).to(tl.float32)
    channel = tl.arange(0, BLOCK)
    to = out + tl.load(cache_slots + t) // POOL * DIM + channel
    tl.store(to, tl.sum(shares * keys, 0).to(kind), channel < DIM)


class GpuPooledIndex:
    """`PooledIndex` in bfloat16 or float32."""

    def __init__(self, shape: Index, weights: KeyPoolWeights) -> None:
        self._shape, self._weights = shape, weights._replace(places=weights.places.contiguous())
        self._pools = Pools(shape.heads, shape.dim, shape.budget // shape.pool, shape.pool)

    def __call__(
        self, q: Tensor, raw_keys: Tensor, gates: Tensor, step: StepContext, cache: PooledKeys
    ) -> SelectedKeys | None:
        self._close_pools(raw_keys.contiguous(), step.rows, cache)
        return chosen_tokens(q.contiguous(), gates.contiguous(), step, cache, self._pools)

    def _close_pools(self, raw: Tensor, rows: StepRows, cache: PooledKeys) -> None:
        s, w, ring = self._shape, self._weights, cache.ring
        fresh, block = torch.empty_like(raw), triton.next_power_of_2(s.dim)
        sizes = {"DIM": s.dim, "PLACES": ring.shape[1], "BLOCK": block, **overlapped(raw.device)}
        _enter[(len(raw),)](
            raw, fresh, ring, w.norm, w.bias, rows.positions, rows.slots, ring.stride(0), s.eps,
            KEPT=rows.row_per_sequence, num_warps=1, **sizes,
        )  # fmt: skip
        _close[(len(raw),)](
            ring, fresh, w.places, cache.keys, rows.positions, rows.sequence, rows.slots, rows.begins, rows.first,
            rows.cache_slots, ring.stride(0), POOL=s.pool, TOKENS=triton.next_power_of_2(s.pool),
            SINGLE=rows.row_per_sequence, num_warps=4, **sizes,
        )  # fmt: skip
        if not rows.row_per_sequence:
            rows.keep(ring, fresh)
