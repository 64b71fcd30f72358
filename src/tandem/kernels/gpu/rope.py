"""Norm of every q and k head, rotation, and the cache write of one layer in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.errors import KernelError
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.ops import HeadNorms, RopeTables

MANY_ROWS, AT_ONCE = 128, 8  # from so many rows on a program has eight heads, a warp each: the bits are the same
SMALL = 128  # channels of a head for one warp


@triton.jit
def _inverse_rms(row, at, inside, size, eps):
    """[N, 1], of `size` numbers each: those of [N, BLOCK] that are inside. row and at: pointers [N, 1], offsets
    [1, BLOCK]."""
    x = tl.load(row + at, inside, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]


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
def _rotated(row, weight, cos, sin, inverse, is_head, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """[N, BLOCK] of the heads that are `is_head`, [N, 1]."""
    d = tl.arange(0, BLOCK)[None, :]
    inside, turned = d < DIM, d < 2 * HALF
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    kind = row.dtype.element_ty
    own = _scaled(row, weight, d, inside & is_head, inverse, NORM)
    other = _scaled(row, weight, partner, turned & is_head, inverse, NORM)
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
def _rope_store(qkv, cos, sin, turns, slots, k_pages, v_pages, q, q_norm, k_norm, eps,
                HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, HALF: tl.constexpr,
                NORM: tl.constexpr, WHOLE: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
                AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A program has AT_ONCE heads of a row: of its queries, its keys or its values."""
    begin(OVERLAP)
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    QUERIES: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    KEYS: tl.constexpr = (KV_HEADS + AT_ONCE - 1) // AT_ONCE
    base = qkv + t * ((HEADS + GATES + KV_HEADS) * DIM + KV_HEADS * VALUE)
    lane, d = tl.arange(0, AT_ONCE)[:, None], tl.arange(0, BLOCK)[None, :]
    slot = tl.load(slots + t)  # below 0: a copy of another row, which writes nothing
    if part >= QUERIES + KEYS:
        v = (part - QUERIES - KEYS) * AT_ONCE + lane
        inside = (v < tl.where(slot >= 0, KV_HEADS, 0)) & (d < VALUE)
        value = tl.load(base + (HEADS + GATES + KV_HEADS) * DIM + v * VALUE + d, inside, other=0.0)
        tl.store(v_pages + (slot * KV_HEADS + v) * VALUE + d, _as_kept(value, v_pages), inside)
        return
    angle = tl.load(turns + t) * HALF
    is_q = part < QUERIES
    h = tl.where(is_q, part, part - QUERIES) * AT_ONCE + lane
    is_head = h < tl.where(is_q, HEADS, KV_HEADS)
    first = tl.where(is_q, h + tl.minimum(h, GATES), HEADS + GATES + h)  # each q head is followed by its gate, if any
    row = base + first * DIM
    weight = q_norm if is_q else k_norm
    inverse = 1.0
    if NORM:
        if WHOLE:  # over all q heads, or all k heads
            whole = base + tl.where(is_q, 0, HEADS * DIM) + tl.zeros([1, 1], tl.int32)
            size, all_of = tl.where(is_q, HEADS, KV_HEADS) * DIM, tl.arange(0, WIDE)[None, :]
            inverse = _inverse_rms(whole, all_of, all_of < size, size, eps)
            weight += h * DIM
        else:
            inverse = _inverse_rms(row, d, is_head & (d < DIM), DIM, eps)
    y = _rotated(row, weight, cos + angle, sin + angle, inverse, is_head, DIM, HALF, NORM, BLOCK)
    if is_q:
        tl.store(q + (t * HEADS + h) * DIM + d, y, is_head & (d < DIM))
    else:
        inside = is_head & (d < tl.where(slot >= 0, DIM, 0))
        tl.store(k_pages + (slot * KV_HEADS + h) * DIM + d, _as_kept(y, k_pages), inside)


def rope_store(
    qkv: Tensor, rope: RopeTables, batch: KernelBatch, pages: tuple[Tensor, Tensor], heads: int, norms: HeadNorms
) -> Tensor:
    """As `Ops.rope_store`."""
    kv_heads, dim = pages[0].shape[2:]
    q, value = qkv.new_empty((qkv.shape[0], heads, dim)), pages[1].shape[3]
    q_norm, k_norm, eps = norms
    has_norm = q_norm is not None and k_norm is not None
    whole, gated = q_norm is not None and q_norm.numel() != dim, qkv.shape[1] == 2 * (heads + kv_heads) * dim
    if whole and gated:
        raise KernelError("a norm over all heads together cannot pass over gates on the GPU")
    at_once = AT_ONCE if len(qkv) >= MANY_ROWS and dim <= SMALL and value <= SMALL and not whole else 1
    parts = triton.cdiv(heads, at_once) + 2 * triton.cdiv(kv_heads, at_once)
    _rope_store[(len(qkv), parts)](
        qkv, rope.cos, rope.sin, batch.positions if batch.turns is None else batch.turns, batch.cache_slots, *pages, q,
        q_norm if q_norm is not None else qkv, k_norm if k_norm is not None else qkv, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, VALUE=value, HALF=rope.rotary_dim // 2, NORM=has_norm,
        WHOLE=whole, GATES=heads if gated else 0,
        BLOCK=triton.next_power_of_2(dim), WIDE=triton.next_power_of_2(heads * dim), AT_ONCE=at_once,
        num_warps=at_once if dim <= SMALL else 4,
        **overlapped(qkv.device),
    )  # fmt: skip
    return q
