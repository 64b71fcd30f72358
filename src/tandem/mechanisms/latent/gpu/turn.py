"""Rotation of queries and keys, the norm of latents and their way into the pages."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.mechanisms.latent.absorbed import LatentSizes, LatentWeights

ROWS = 8  # of a program


@triton.jit
def _turned(
    source, mask, cos, sin, position, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr
):
    """Both halves of ROWS rotations, rounded where Transformers rounds. source [ROWS, 1]: pointers to rotary channels;
    mask [ROWS, 1]; position [ROWS, 1]."""
    i = tl.arange(0, BLOCK)[None, :]
    inside = mask & (i < HALF)
    kind = source.dtype.element_ty
    one = source + (2 * i if NEIGHBOURS else i)
    a = tl.load(one, inside, other=0.0).to(tl.float32)
    b = tl.load(one + (1 if NEIGHBOURS else HALF), inside, other=0.0).to(tl.float32)
    c = tl.load(cos + position * HALF + i, inside, other=1.0).to(kind).to(tl.float32)
    s = tl.load(sin + position * HALF + i, inside, other=0.0).to(kind).to(tl.float32)
    first = (a * c).to(kind).to(tl.float32) - (b * s).to(kind).to(tl.float32)
    second = (b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32)
    return first.to(kind), second.to(kind), inside


@triton.jit
def _turn_queries(q, out, t, mask, h, position, cos, sin, q_row, q_head, out_row, out_head,
                  HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """q and out: a head's rotary channels."""
    source = q + h * q_head + t[:, None] * q_row
    first, second, inside = _turned(
        source, mask[:, None], cos, sin, position[:, None], HALF, NEIGHBOURS, BLOCK
    )
    to = out + h * out_head + t[:, None] * out_row + tl.arange(0, BLOCK)[None, :]
    tl.store(to, first, inside)
    tl.store(to + HALF, second, inside)


@triton.jit
def _store_keys(kv, pages, weight, t, mask, position, slot, cos, sin, eps, RANK: tl.constexpr, HALF: tl.constexpr,
                NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr, LATENT: tl.constexpr):  # fmt: skip
    WIDTH: tl.constexpr = RANK + 2 * HALF
    d, row, to = tl.arange(0, LATENT)[None, :], kv + t[:, None] * WIDTH, pages + slot[:, None] * WIDTH
    inside = mask[:, None] & (d < RANK)
    kind = kv.dtype.element_ty
    c = tl.load(row + d, inside, other=0.0).to(tl.float32)
    unit = (c * tl.rsqrt(tl.sum(c * c, 1) / RANK + eps)[:, None]).to(kind).to(tl.float32)
    y = unit * tl.load(weight + d, d < RANK, other=0.0).to(tl.float32)
    tl.store(to + 2 * HALF + d, y.to(kind), inside)
    if HALF:
        first, second, both = _turned(
            row + RANK, mask[:, None], cos, sin, position[:, None], HALF, NEIGHBOURS, BLOCK
        )
        i = tl.arange(0, BLOCK)[None, :]
        tl.store(to + i, first, both)
        tl.store(to + HALF + i, second, both)


@triton.jit(do_not_specialize=["rows", "decoding"], do_not_specialize_on_alignment=["positions", "slots"])
def _turn(q, kv, pages, out, weight, positions, slots, cos, sin, eps, rows, decoding, q_row, q_head, out_row,
          HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr,
          KEYS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LATENT: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    """With KEYS, head 0 is the key's. Absorbed queries, of the first `decoding` rows, begin with rotary channels."""
    begin(OVERLAP)
    h = tl.program_id(0).to(tl.int64) - KEYS
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    mask = t < (rows if h < 0 else decoding)
    position = tl.load(positions + t, mask, other=0)
    if h < 0:
        slot = tl.load(slots + t, mask, other=0)
        _store_keys(
            kv, pages, weight, t, mask, position, slot, cos, sin, eps, RANK, HALF, NEIGHBOURS, BLOCK, LATENT
        )
    else:
        _turn_queries(q + NOPE, out, t, mask, h, position, cos, sin, q_row, q_head, out_row, RANK + 2 * HALF,
                      HALF, NEIGHBOURS, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=["before", "rows", "total"], do_not_specialize_on_alignment=["positions"])
def _spread(q, out, positions, cos, sin, before, rows, total, q_row, q_head,
            HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr,
            ROWS: tl.constexpr, BLOCK: tl.constexpr, STRAIGHT: tl.constexpr):  # fmt: skip
    """Rows of a chunk, turned, as rows before … before + rows - 1 of `total`; the others are zeros."""
    h, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    source, mask = t - before, (t >= before) & (t < before + rows)
    WIDTH: tl.constexpr = NOPE + 2 * HALF
    d, to = tl.arange(0, STRAIGHT)[None, :], out + (t[:, None] * HEADS + h) * WIDTH
    x = tl.load(q + h * q_head + source[:, None] * q_row + d, mask[:, None] & (d < NOPE), other=0.0)
    tl.store(to + d, x, (t < total)[:, None] & (d < NOPE))
    if HALF:
        position = tl.load(positions + source, mask, other=0)
        rotary = q + h * q_head + source[:, None] * q_row + NOPE
        first, second, _ = _turned(rotary, mask[:, None], cos, sin, position[:, None], HALF, NEIGHBOURS, BLOCK)
        i = tl.arange(0, BLOCK)[None, :]
        inside = (t < total)[:, None] & (i < HALF)
        tl.store(to + NOPE + i, first, inside)
        tl.store(to + NOPE + HALF + i, second, inside)


class NewKeys(NamedTuple):
    """Rows kv [T, rank + rope], and where their keys go: rows slots [T] of the pages."""

    kv: Tensor
    pages: Tensor
    slots: Tensor


def turn(
    q: Tensor,
    positions: Tensor,
    sizes: LatentSizes,
    weights: LatentWeights,
    keys: NewKeys | None = None,
) -> Tensor:
    """Absorbed queries [t, H, width] with turned rotary channels in front, of q [t, H, nope + rope]; their latent
    channels are still to be filled in. keys: of these rows and further ones, at positions [T]."""
    decoding, heads, half = len(q), sizes.heads, sizes.rope // 2
    out = q.new_empty((decoding, heads, sizes.width))
    kv, pages, slots = keys or (q, out, positions)
    rows = len(kv) if keys else 0
    programs = (heads if decoding and half else 0) + bool(rows)
    if not programs:  # nothing turns
        return out
    _turn[(programs, triton.cdiv(max(rows, decoding), ROWS))](
        q, kv, pages, out, weights.norm, positions, slots, weights.rope.cos, weights.rope.sin,
        weights.eps, rows, decoding, q.stride(0), q.stride(1), out.stride(0),
        HEADS=heads, NOPE=sizes.nope, RANK=sizes.rank, HALF=half, NEIGHBOURS=weights.neighbours,
        KEYS=int(rows > 0), ROWS=ROWS, BLOCK=triton.next_power_of_2(max(1, half)),
        LATENT=triton.next_power_of_2(sizes.rank), num_warps=4, **overlapped(q.device),
    )  # fmt: skip
    return out


def spread(
    q: Tensor, positions: Tensor, before: int, total: int, sizes: LatentSizes, weights: LatentWeights
) -> Tensor:
    """q [T, G, nope + rope] of a chunk, turned, after `before` rows of zeros and before others: [total, G, …]."""
    rows, heads, _ = q.shape
    out, half = q.new_empty((total, heads, q.shape[2])), sizes.rope // 2
    _spread[(heads, triton.cdiv(total, ROWS))](
        q, out, positions, weights.rope.cos, weights.rope.sin, before, rows, total, q.stride(0), q.stride(1),
        HEADS=heads, NOPE=sizes.nope, HALF=half, NEIGHBOURS=weights.neighbours, ROWS=ROWS,
        BLOCK=triton.next_power_of_2(max(1, half)), STRAIGHT=triton.next_power_of_2(sizes.nope), num_warps=4,
    )  # fmt: skip
    return out
