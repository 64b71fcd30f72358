"""New rows turn and go into their sequences' rings; entries whose last token has come are closed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.config.mechanisms.shared_kv import Pool, SharedKv
from tandem.kernels.gpu.overlap import begin, overlapped
from tandem.kernels.shared_kv.heads import Projected
from tandem.kernels.shared_kv.rows import StepRows
from tandem.kernels.shared_kv.weights import SharedKvWeights

TOKENS, MANY = 8, 32  # of an entry that is being closed, at a time; of one of many tokens, which would wait too often


class Asked(NamedTuple):
    """Of an index: turned queries [T, Hi * Di], and weights of heads, float32 [T, Hi]."""

    q: Tensor
    weights: Tensor


@triton.jit
def turned(a, b, cos, sin, i, inside, HALF: tl.constexpr, PAIRS: tl.constexpr, BACK: tl.constexpr):
    """Pairs i of HALF, in float32, of which the last PAIRS turn; cos and sin begin with the position's first."""
    at, turns = i - (HALF - PAIRS), inside & (i >= HALF - PAIRS)
    c = tl.load(cos + at, turns, other=1.0)
    s = tl.load(sin + at, turns, other=0.0)
    if BACK:
        s = -s
    return a * c - b * s, b * c + a * s


@triton.jit
def _turn_row(row, to, cos, sin, DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < DIM // 2
    a = tl.load(row + 2 * i, inside, other=0.0)
    b = tl.load(row + 2 * i + 1, inside, other=0.0)
    first, second = turned(a.to(tl.float32), b.to(tl.float32), cos, sin, i, inside, DIM // 2, PAIRS, False)
    tl.store(to + 2 * i, first.to(to.dtype.element_ty), inside)
    tl.store(to + 2 * i + 1, second.to(to.dtype.element_ty), inside)


@triton.jit
def _enter(q, kv, inputs, index_q, index_weights, ring, kept, asked, weights, cos, sin, positions, slots,
           inputs_row, weights_row, ring_slot, kept_slot, HEADS: tl.constexpr, DIM: tl.constexpr, RING: tl.constexpr,
           INPUTS: tl.constexpr, KEPT: tl.constexpr, INDEX_HEADS: tl.constexpr, INDEX_DIM: tl.constexpr,
           PAIRS: tl.constexpr, BLOCK: tl.constexpr, INDEX_BLOCK: tl.constexpr, INPUTS_BLOCK: tl.constexpr,
           HEADS_BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Programs of a row: its heads of queries, its key, its inputs and an index's weights, an index's heads."""
    begin(OVERLAP)
    h, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position, slot = tl.load(positions + t), tl.load(slots + t)
    cos += position * PAIRS
    sin += position * PAIRS
    if h < HEADS:
        row = q + (t * HEADS + h) * DIM
        _turn_row(row, row, cos, sin, DIM, PAIRS, BLOCK)
    elif h == HEADS:
        to = ring + slot * ring_slot + position % RING * DIM
        _turn_row(kv + t * DIM, to, cos, sin, DIM, PAIRS, BLOCK)
    elif h == HEADS + 1:
        if INPUTS > 0:
            i = tl.arange(0, INPUTS_BLOCK)
            value = tl.load(inputs + t * inputs_row + i, i < INPUTS)
            tl.store(kept + slot * kept_slot + position % KEPT * INPUTS + i, value, i < INPUTS)
        if INDEX_HEADS > 0:
            i = tl.arange(0, HEADS_BLOCK)
            value = tl.load(index_weights + t * weights_row + i, i < INDEX_HEADS)
            tl.store(weights + t * INDEX_HEADS + i, value.to(tl.float32), i < INDEX_HEADS)
    else:
        at = (t * INDEX_HEADS + h - HEADS - 2) * INDEX_DIM
        _turn_row(index_q + at, asked + at, cos, sin, INDEX_DIM, PAIRS, INDEX_BLOCK)


@triton.jit
def _gathered(row, bias, r, there, i, inside, SIZE: tl.constexpr, SERIES: tl.constexpr, STRIDE: tl.constexpr):
    """Inputs and gates [rows, pairs] of one channel of each pair. With two series the tokens before the entry's own
    count by the first."""
    column = i[None, :] + tl.where((SERIES > 1) & (r >= STRIDE), SIZE, 0)[:, None]
    valid = there[:, None] & inside[None, :]
    x = tl.load(row[:, None] + column, valid, other=0.0).to(tl.float32)
    gate = tl.load(row[:, None] + SERIES * SIZE + column, valid, other=0.0).to(tl.float32)
    gate += tl.load(bias + r[:, None] * SIZE + i[None, :], valid, other=0.0)
    return x, tl.where(valid, gate, float("-inf"))


@triton.jit
def _joined(x, gate, most, total, acc):
    """A softmax's running maximum, sum and weighted sum, with more rows."""
    top = tl.maximum(most, tl.max(gate, 0))
    safe = tl.where(top == float("-inf"), 0.0, top)
    before, new = tl.exp(most - safe), tl.exp(gate - safe[None, :])
    return top, total * before + tl.sum(new, 0), acc * before + tl.sum(new * x, 0)


@triton.jit
def _close(kept, bias, norm, pages, cos, sin, positions, slots, places, eps, first, kept_slot, INPUTS: tl.constexpr,
           KEPT: tl.constexpr, SIZE: tl.constexpr, SERIES: tl.constexpr, STRIDE: tl.constexpr, PAIRS: tl.constexpr,
           BLOCK: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """first: the column where this kind of entry's inputs begin."""
    begin(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    if (position + 1) % STRIDE != 0:
        return
    slot, i, rows = tl.load(slots + t), tl.arange(0, BLOCK), SERIES * STRIDE
    inside = i < SIZE // 2
    low = tl.full([BLOCK], float("-inf"), tl.float32)
    zero = tl.zeros([BLOCK], tl.float32)
    most_a, total_a, acc_a, most_b, total_b, acc_b = low, zero, zero, low, zero, zero
    for start in range(0, rows, TOKENS):
        r = start + tl.arange(0, TOKENS)
        token = position - (rows - 1) + r
        there = (token >= 0) & (r < rows)
        row = kept + slot * kept_slot + tl.where(there, token, 0) % KEPT * INPUTS + first
        x, gate = _gathered(row, bias, r, there, 2 * i, inside, SIZE, SERIES, STRIDE)
        most_a, total_a, acc_a = _joined(x, gate, most_a, total_a, acc_a)
        x, gate = _gathered(row, bias, r, there, 2 * i + 1, inside, SIZE, SERIES, STRIDE)
        most_b, total_b, acc_b = _joined(x, gate, most_b, total_b, acc_b)
    a, b = tl.where(inside, acc_a / total_a, 0.0), tl.where(inside, acc_b / total_b, 0.0)
    inverse = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / SIZE + eps)
    a *= inverse * tl.load(norm + 2 * i, inside, other=0.0)
    b *= inverse * tl.load(norm + 2 * i + 1, inside, other=0.0)
    angle = (position + 1 - STRIDE) * PAIRS
    a, b = turned(a, b, cos + angle, sin + angle, i, inside, SIZE // 2, PAIRS, False)
    to = pages + tl.load(places + t) // STRIDE * SIZE
    tl.store(to + 2 * i, a.to(to.dtype.element_ty), inside)
    tl.store(to + 2 * i + 1, b.to(to.dtype.element_ty), inside)


def enter(
    p: Projected, rows: StepRows, shape: SharedKv, weights: SharedKvWeights, ring: Tensor, kept: Tensor | None
) -> Asked | None:
    """Turns queries in place; key and inputs go into their rings. What an index is asked with, if there is one."""
    pool, count = shape.pool, len(p.q)
    index = None if pool is None else pool.index
    heads, dim = (0, 2) if index is None else (index.heads, index.dim)
    asked = Asked(p.q.new_empty(count, heads * dim), p.q.new_empty((count, heads), dtype=torch.float32))
    inputs, size = (p.kv, 0) if p.inputs is None else (p.inputs, p.inputs.shape[1])
    index_q, index_weights = p.q, p.kv
    if p.index_q is not None and p.index_weights is not None:
        index_q, index_weights = p.index_q, p.index_weights
    _enter[(shape.heads + 2 + heads, count)](
        p.q, p.kv, inputs, index_q, index_weights, ring, ring if kept is None else kept, asked.q, asked.weights,
        weights.cos, weights.sin, rows.positions, rows.slots, inputs.stride(0), index_weights.stride(0),
        ring.stride(0), 0 if kept is None else kept.stride(0), HEADS=shape.heads, DIM=shape.dim,
        RING=ring.shape[1], INPUTS=size, KEPT=1 if kept is None else kept.shape[1], INDEX_HEADS=heads,
        INDEX_DIM=dim, PAIRS=weights.cos.shape[1], BLOCK=triton.next_power_of_2(shape.dim // 2),
        INDEX_BLOCK=triton.next_power_of_2(dim // 2), INPUTS_BLOCK=triton.next_power_of_2(max(1, size)),
        HEADS_BLOCK=triton.next_power_of_2(max(1, heads)), num_warps=2, **overlapped(p.q.device),
    )  # fmt: skip
    return None if index is None else asked


def close(
    rows: StepRows, shape: SharedKv, pool: Pool, weights: SharedKvWeights, kept: Tensor, pages: tuple[Tensor, ...]
) -> None:
    """Writes the entries, and an index's, whose last token is among the rows."""
    first, many = 0, pool.rows >= 2 * MANY
    for size, each, page in zip(pool.widths(shape.dim), weights.pools, pages, strict=True):
        _close[(len(rows.positions),)](
            kept, each.bias, each.norm, page, weights.cos, weights.sin, rows.positions, rows.slots, rows.cache_slots,
            shape.eps, first, kept.stride(0), INPUTS=kept.shape[2], KEPT=kept.shape[1], SIZE=size, SERIES=pool.series,
            STRIDE=pool.stride, PAIRS=weights.cos.shape[1], BLOCK=triton.next_power_of_2(size // 2),
            TOKENS=MANY if many else TOKENS, num_warps=16 if many else 4, **overlapped(kept.device),
        )  # fmt: skip
        first += 2 * pool.series * size
