"""New rows turn and go into their sequences' rings; tokens whose last one has come are compressed to an entry."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.step_rows import StepRows
from tandem.mechanisms.compressed_attention.shape import CompressedAttention, Compression
from tandem.mechanisms.compressed_attention.torch import Projected
from tandem.mechanisms.compressed_attention.weights import CompressedWeights

ELEMENTS = 2048  # of an entry that is being closed, for a program: all its tokens, some channels
LEAST_CHANNELS = 16  # two bytes each: less than 32 bytes are not read at a time


class IndexQueryRows(NamedTuple):
    """Query of an index, if there is one: turned queries [T, Hi * Di], and weights of heads, float32 [T, Hi]. arrived
    int32 [T, 2]: zeros, for `compress`."""

    q: Tensor
    weights: Tensor
    arrived: Tensor


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
def _append_rows(q, kv, inputs, index_q, index_weights, ring, input_ring, queries, weights, arrived, cos, sin,
           positions, slots, inputs_row, weights_row, ring_slot, kept_slot, HEADS: tl.constexpr, DIM: tl.constexpr,
           RING: tl.constexpr, INPUTS: tl.constexpr, KEPT: tl.constexpr, INDEX_HEADS: tl.constexpr,
           INDEX_DIM: tl.constexpr,
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
            tl.store(input_ring + slot * kept_slot + position % KEPT * INPUTS + i, value, i < INPUTS)
            tl.store(arrived + 2 * t + tl.arange(0, 2), tl.zeros([2], tl.int32))
        if INDEX_HEADS > 0:
            i = tl.arange(0, HEADS_BLOCK)
            value = tl.load(index_weights + t * weights_row + i, i < INDEX_HEADS)
            tl.store(weights + t * INDEX_HEADS + i, value.to(tl.float32), i < INDEX_HEADS)
    else:
        at = (t * INDEX_HEADS + h - HEADS - 2) * INDEX_DIM
        _turn_row(index_q + at, queries + at, cos, sin, INDEX_DIM, PAIRS, INDEX_BLOCK)


@triton.jit
def _pooled(input_ring, fresh, since, bias, position, channel, INPUTS: tl.constexpr, KEPT: tl.constexpr,
            SIZE: tl.constexpr, SERIES: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Channels of the entry that ends at a position: sums of its tokens' inputs by the softmax of their gates, float32.
    With two series the tokens before the entry's own count by the first. input_ring: the sequence's, where tokens
    before `since` are; fresh: where others are, at their position."""
    r, rows = tl.arange(0, TOKENS), SERIES * STRIDE
    token = position - (rows - 1) + r
    real = (token >= 0) & (r < rows)
    valid = real[:, None] & (channel < SIZE)[None, :]
    series = channel[None, :] + tl.where((SERIES > 1) & (r >= STRIDE), SIZE, 0)[:, None]
    old, new = input_ring + tl.where(real, token, 0) % KEPT * INPUTS, fresh + token * INPUTS
    at = tl.where(token < since, old, new)[:, None] + series
    x = tl.load(at, valid, other=0.0).to(tl.float32)
    gate = tl.load(at + SERIES * SIZE, valid, other=0.0).to(tl.float32)
    gate += tl.load(bias + r[:, None] * SIZE + channel[None, :], valid, other=0.0)
    gate = tl.where(valid, gate, float("-inf"))
    most = tl.max(gate, 0)
    shares = tl.exp(gate - tl.where(most == float("-inf"), 0.0, most)[None, :])
    return tl.sum(shares * x, 0) / tl.sum(shares, 0)


@triton.jit
def _write_entry(sums, norm, to, cos, sin, eps, SIZE: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of all channels, which other programs have just written, normed and turned."""
    i = tl.arange(0, BLOCK)
    inside = i < SIZE // 2
    a = tl.load(sums + 2 * i, inside, other=0.0, cache_modifier=".cg")
    b = tl.load(sums + 2 * i + 1, inside, other=0.0, cache_modifier=".cg")
    inverse = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / SIZE + eps)
    a *= inverse * tl.load(norm + 2 * i, inside, other=0.0)
    b *= inverse * tl.load(norm + 2 * i + 1, inside, other=0.0)
    a, b = turned(a, b, cos, sin, i, inside, SIZE // 2, PAIRS, False)
    tl.store(to + 2 * i, a.to(to.dtype.element_ty), inside)
    tl.store(to + 2 * i + 1, b.to(to.dtype.element_ty), inside)


@triton.jit
def _compress_part(input_ring, fresh, since, bias, norm, pages, sums, arrived, cos, sin, position, place, eps, part,
                INPUTS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr, SERIES: tl.constexpr,
                STRIDE: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """A part of an entry's channels; the last part to arrive writes the entry."""
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    y = _pooled(input_ring, fresh, since, bias, position, channel, INPUTS, KEPT, SIZE, SERIES, STRIDE, TOKENS)
    tl.store(sums + channel, y, channel < SIZE)
    tl.debug_barrier()  # every thread has stored before the count is raised
    parts = (SIZE + CHANNELS - 1) // CHANNELS
    if tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
        angle = (position + 1 - STRIDE) * PAIRS
        to = pages + place // STRIDE * SIZE
        _write_entry(sums, norm, to, cos + angle, sin + angle, eps, SIZE, PAIRS, BLOCK)


@triton.jit
def _compress(input_ring, fresh, bias, norm, pages, index_bias, index_norm, index_pages, sums, arrived, cos, sin,
           positions, sequences, slots, begins, firsts, places, eps, kept_slot, INPUTS: tl.constexpr,
           KEPT: tl.constexpr, SIZE: tl.constexpr, INDEX_SIZE: tl.constexpr, SERIES: tl.constexpr, STRIDE: tl.constexpr,
           PAIRS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
           INDEX_BLOCK: tl.constexpr, SINGLE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Programs of a row: parts of its entry's channels, then those of an index's entry. SINGLE: each row is a sequence,
    and its inputs are in the ring; else those of the step are fresh [T, INPUTS]."""
    begin(OVERLAP)
    # All on one axis of the grid: the others end at 65,535 rows.
    every = (SIZE + CHANNELS - 1) // CHANNELS + (INDEX_SIZE + CHANNELS - 1) // CHANNELS
    part, t = tl.program_id(0) % every, (tl.program_id(0) // every).to(tl.int64)
    position = tl.load(positions + t)
    if (position + 1) % STRIDE != 0:
        return
    sequence = t if SINGLE else tl.load(sequences + t)
    since = position + 1 if SINGLE else tl.load(firsts + sequence)
    input_ring += tl.load(slots + sequence) * kept_slot
    if not SINGLE:
        fresh += (tl.load(begins + sequence) - since) * INPUTS
    place, parts = tl.load(places + t), (SIZE + CHANNELS - 1) // CHANNELS
    sums += t * (SIZE + INDEX_SIZE)
    if part < parts:
        _compress_part(input_ring, fresh, since, bias, norm, pages, sums, arrived + 2 * t, cos, sin, position, place,
                    eps, part, INPUTS, KEPT, SIZE, SERIES, STRIDE, PAIRS, TOKENS, CHANNELS, BLOCK)  # fmt: skip
    elif INDEX_SIZE:
        own = 2 * SERIES * SIZE  # columns before an index's
        _compress_part(input_ring + own, fresh + own, since, index_bias, index_norm, index_pages, sums + SIZE,
                    arrived + 2 * t + 1, cos, sin, position, place, eps, part - parts, INPUTS, KEPT, INDEX_SIZE,
                    SERIES, STRIDE, PAIRS, TOKENS, CHANNELS, INDEX_BLOCK)  # fmt: skip


def append_rows(
    p: Projected, rows: StepRows, shape: CompressedAttention, weights: CompressedWeights, ring: Tensor,
    input_ring: Tensor | None,
) -> IndexQueryRows:
    """Turns queries in place; key and inputs go into their rings."""
    compression, count = shape.compression, len(p.q)
    index = None if compression is None else compression.index
    heads, dim = (0, 2) if index is None else (index.heads, index.dim)
    weights_of_heads = p.q.new_empty((count, heads), dtype=torch.float32)
    entered = IndexQueryRows(
        p.q.new_empty(count, heads * dim),
        weights_of_heads,
        rows.slots.new_empty((count, 2), dtype=torch.int32),
    )
    inputs, size = (p.kv, 0) if p.inputs is None else (p.inputs, p.inputs.shape[1])
    index_q, index_weights = p.q, p.kv
    if p.index_q is not None and p.index_weights is not None:
        index_q, index_weights = p.index_q, p.index_weights
    _append_rows[(shape.heads + 2 + heads, count)](
        p.q, p.kv, inputs, index_q, index_weights, ring, ring if input_ring is None else input_ring, *entered,
        weights.cos, weights.sin, rows.positions, rows.slots, inputs.stride(0), index_weights.stride(0),
        ring.stride(0), 0 if input_ring is None else input_ring.stride(0), HEADS=shape.heads, DIM=shape.dim,
        RING=ring.shape[1], INPUTS=size, KEPT=1 if input_ring is None else input_ring.shape[1], INDEX_HEADS=heads,
        INDEX_DIM=dim, PAIRS=weights.cos.shape[1], BLOCK=triton.next_power_of_2(shape.dim // 2),
        INDEX_BLOCK=triton.next_power_of_2(dim // 2), INPUTS_BLOCK=triton.next_power_of_2(max(1, size)),
        HEADS_BLOCK=triton.next_power_of_2(max(1, heads)), num_warps=2, **overlapped(p.q.device),
    )  # fmt: skip
    return entered


def compress(
    rows: StepRows,
    shape: CompressedAttention,
    compression: Compression,
    weights: CompressedWeights,
    input_ring: Tensor,
    pages: tuple[Tensor, ...],
    arrived: Tensor,
    fresh: Tensor | None = None,
) -> None:
    """Writes the entries, and an index's, whose last token is among the rows. arrived: zeros, as `append_rows` left it.
    fresh [T, n]: inputs of rows that are not in the ring yet; None: every row is a sequence of its own, and in its
    ring."""
    count, (size, *more) = len(rows.positions), compression.widths(shape.dim)
    tokens, index_size = triton.next_power_of_2(compression.rows), more[0] if more else 0
    channels = max(LEAST_CHANNELS, ELEMENTS // tokens)
    own, index = weights.compressions[0], weights.compressions[-1]
    sums = input_ring.new_empty((count, size + index_size), dtype=torch.float32)
    _compress[((triton.cdiv(size, channels) + triton.cdiv(index_size, channels)) * count,)](
        input_ring, input_ring if fresh is None else fresh, *own, pages[0], *index, pages[-1], sums, arrived,
        weights.cos, weights.sin, rows.positions, rows.sequence, rows.slots, rows.begins, rows.first, rows.cache_slots,
        shape.eps, input_ring.stride(0), INPUTS=input_ring.shape[2], KEPT=input_ring.shape[1], SIZE=size,
        INDEX_SIZE=index_size, SERIES=compression.series, STRIDE=compression.stride, PAIRS=weights.cos.shape[1],
        TOKENS=tokens, CHANNELS=channels, BLOCK=triton.next_power_of_2(size // 2),
        INDEX_BLOCK=triton.next_power_of_2(max(2, index_size) // 2), SINGLE=fresh is None, num_warps=4,
        **overlapped(input_ring.device),
    )  # fmt: skip
