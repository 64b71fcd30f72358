"""Rotation of an indexer's queries, and the norm and rotation of its keys on their way into the pages."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights

ROWS = 4  # of a program


class TurnPlaces(NamedTuple):
    """positions int64 [T], and rows of the cache that keys go to, int64 [T]."""

    positions: Tensor
    slots: Tensor


@triton.jit
def _normed(row, weight, bias, eps, mean, factor, at, inside):
    """Channels `at` of keys, rounded as activations are. mean, factor [ROWS, 1]."""
    x = tl.load(row + at, inside, other=0.0)
    w, b = tl.load(weight + at, inside, other=0.0), tl.load(bias + at, inside, other=0.0)
    return ((x.to(tl.float32) - mean) * factor * w + b).to(x.dtype).to(tl.float32)


@triton.jit
def _turned(own, other, cos, sin, angle, d, inside, kind: tl.constexpr, HALF: tl.constexpr):
    """Halves of rotations, rounded where Transformers rounds; channels past them as they are."""
    i = tl.where(d < HALF, d, d - HALF)
    turned = inside & (d < 2 * HALF)
    c = tl.load(cos + angle + i, turned, other=1.0).to(kind).to(tl.float32)
    s = tl.load(sin + angle + i, turned, other=0.0).to(kind).to(tl.float32)
    first, second = (own * c).to(kind).to(tl.float32), (other * s).to(kind).to(tl.float32)
    return tl.where(d < 2 * HALF, tl.where(d < HALF, first - second, first + second), own).to(kind)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "slots"])
def _turn_index(q, k, pages, out, weight, bias, positions, slots, cos, sin, eps, rows,
                HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr,
                ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Program 0 of each block of rows has the keys, the others have a head of the queries each."""
    begin(OVERLAP)
    h = tl.program_id(0).to(tl.int64) - 1
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    mask, d = (t < rows)[:, None], tl.arange(0, BLOCK)[None, :]
    inside, first, turned = mask & (d < DIM), d < HALF, d < 2 * HALF
    i = tl.where(first, d, d - HALF)
    if NEIGHBOURS:
        own, other = tl.where(first, 2 * i, 2 * i + 1), tl.where(first, 2 * i + 1, 2 * i)
    else:
        own, other = d, tl.where(first, d + HALF, i)
    own, other = tl.where(turned, own, d), tl.where(turned, other, d)
    kind: tl.constexpr = q.dtype.element_ty
    angle = tl.load(positions + t, t < rows, other=0)[:, None] * HALF
    if h < 0:
        row = k + t[:, None] * DIM
        x = tl.load(row + d, inside, other=0.0).to(tl.float32)
        mean = (tl.sum(x, 1) / DIM)[:, None]
        centred = tl.where(inside, x - mean, 0.0)
        factor = (1.0 / tl.sqrt(tl.sum(centred * centred, 1) / DIM + eps))[:, None]
        a = _normed(row, weight, bias, eps, mean, factor, own, inside)
        b = _normed(row, weight, bias, eps, mean, factor, other, inside)
        slot = tl.load(slots + t, t < rows, other=0)[:, None]
        tl.store(pages + slot * DIM + d, _turned(a, b, cos, sin, angle, d, inside, kind, HALF), inside)
    else:
        at = (t[:, None] * HEADS + h) * DIM
        a = tl.load(q + at + own, inside, other=0.0).to(tl.float32)
        b = tl.load(q + at + other, inside, other=0.0).to(tl.float32)
        tl.store(out + at + d, _turned(a, b, cos, sin, angle, d, inside, kind, HALF), inside)


def turn_index(q: Tensor, k: Tensor, pages: Tensor, places: TurnPlaces, shape: Index, weights: IndexWeights) -> Tensor:
    """q [T, heads * dim], turned; the keys of k [T, dim] go into the pages. Pairs of neighbours become halves."""
    rows, out = len(q), q.new_empty(q.shape)
    _turn_index[(shape.heads + 1, triton.cdiv(rows, ROWS))](
        q, k, pages, out, weights.norm, weights.bias, *places, weights.cos, weights.sin, shape.eps, rows,
        HEADS=shape.heads, DIM=shape.dim, HALF=shape.rope.dims // 2, NEIGHBOURS=shape.rope.pairs == "neighbours",
        ROWS=ROWS, BLOCK=triton.next_power_of_2(shape.dim), num_warps=4, **overlapped(q.device),
    )  # fmt: skip
    return out
