"""Norm of every q and k head, rotation, and the cache write of one layer in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tandem.errors import KernelError
from tandem.kernels.batch_layout import BatchLayout
from tandem.kernels.gpu.overlap import begin, overlapped
from tandem.kernels.ops import Rope


class HeadCounts(NamedTuple):
    """Query heads, key/value heads and channels of each; those of a value."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


@triton.jit
def _inverse_rms(row, size, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = tl.load(row + columns, columns < size, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x) / size + eps)


@triton.jit
def _scaled(row, weight, at, inside, inverse, NORM: tl.constexpr):
    """Elements `at` of a head, float32, rounded where Transformers rounds."""
    x = tl.load(row + at, inside, other=0.0)
    if NORM:
        unit = x.to(tl.float32) * inverse
        if weight.dtype.element_ty != tl.float32:
            unit = unit.to(x.dtype).to(tl.float32)
        x = (unit * tl.load(weight + at, inside, other=0.0).to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _rotated(row, weight, cos, sin, inverse, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    d = tl.arange(0, BLOCK)
    inside, turned = d < DIM, d < 2 * HALF
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    kind = row.dtype.element_ty
    own = _scaled(row, weight, d, inside, inverse, NORM)
    other = _scaled(row, weight, partner, turned, inverse, NORM)
    c = tl.load(cos + d % HALF, turned, other=1.0).to(kind).to(tl.float32)
    s = tl.load(sin + d % HALF, turned, other=0.0).to(kind).to(tl.float32)
    first, second = (own * c).to(kind).to(tl.float32), (other * s).to(kind).to(tl.float32)
    both = tl.where(d < HALF, first - second, first + second)
    return tl.where(turned, both, own).to(kind)


@triton.jit
def _as_kept(x, pages):
    """In the pages' dtype; by way of float32, from which all GPUs that know fp8 convert."""
    if x.dtype != pages.dtype.element_ty:
        x = x.to(tl.float32).to(pages.dtype.element_ty)
    return x


@triton.jit
def _rope_store(qkv, cos, sin, positions, slots, k_pages, v_pages, q, q_norm, k_norm, eps,
                HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, HALF: tl.constexpr,
                NORM: tl.constexpr, WHOLE: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr,
                WIDE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = qkv + t * ((HEADS + GATES + KV_HEADS) * DIM + KV_HEADS * VALUE)
    row = base + (h + tl.minimum(h, GATES)) * DIM  # each q head is followed by its gate, where there are any
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    slot = tl.load(slots + t)  # below 0: a copy of another row, which writes nothing
    if h >= HEADS + KV_HEADS:
        v = h - HEADS - KV_HEADS
        row = base + (HEADS + GATES + KV_HEADS) * DIM + v * VALUE
        to = v_pages + (slot * KV_HEADS + v) * VALUE
        tl.store(to + d, _as_kept(tl.load(row + d, d < VALUE), v_pages), d < tl.where(slot >= 0, VALUE, 0))
        return
    angle = tl.load(positions + t) * HALF
    is_q = h < HEADS
    weight = q_norm if is_q else k_norm
    inverse = 1.0
    if NORM:
        if WHOLE:  # over all q heads, or all k heads
            inverse = _inverse_rms(
                base if is_q else base + HEADS * DIM, (HEADS if is_q else KV_HEADS) * DIM, eps, WIDE
            )
            weight += (h if is_q else h - HEADS) * DIM
        else:
            inverse = _inverse_rms(row, DIM, eps, BLOCK)
    y = _rotated(row, weight, cos + angle, sin + angle, inverse, DIM, HALF, NORM, BLOCK)
    if is_q:
        tl.store(q + (t * HEADS + h) * DIM + d, y, inside)
    else:
        to = k_pages + (slot * KV_HEADS + h - HEADS) * DIM
        tl.store(to + d, _as_kept(y, k_pages), d < tl.where(slot >= 0, DIM, 0))


def rope_store(
    qkv: Tensor, rope: Rope, batch: BatchLayout, pages: tuple[Tensor, Tensor], counts: HeadCounts,
    norms: tuple[Tensor | None, Tensor | None], eps: float,
) -> Tensor:  # fmt: skip
    """As `Ops.rope_store`."""
    heads, kv_heads, dim, value = counts
    q = qkv.new_empty((qkv.shape[0], heads, dim))
    q_norm, k_norm = norms
    has_norm = q_norm is not None and k_norm is not None
    whole, gated = q_norm is not None and q_norm.numel() != dim, qkv.shape[1] == 2 * (heads + kv_heads) * dim
    if whole and gated:
        raise KernelError("a norm over all heads together cannot pass over gates on the GPU")
    _rope_store[(qkv.shape[0], heads + 2 * kv_heads)](
        qkv, rope.cos, rope.sin, batch.positions, batch.cache_slots, *pages, q,
        q_norm if q_norm is not None else qkv, k_norm if k_norm is not None else qkv, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, VALUE=value, HALF=rope.rotary_dim // 2, NORM=has_norm,
        WHOLE=whole, GATES=heads if gated else 0,
        BLOCK=triton.next_power_of_2(dim), WIDE=triton.next_power_of_2(heads * dim), num_warps=1 if dim <= 128 else 4,
        **overlapped(qkv.device),
    )  # fmt: skip
    return q
