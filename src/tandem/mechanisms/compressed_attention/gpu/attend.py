"""Attention of single rows to a window and to entries: blocks of heads against parts of the keys, then their sum.

Every row's keys are divided among programs, so that a long context keeps a whole GPU busy. Keys are values, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.gpu.shared_memory import shared_bytes
from tandem.kernels.step_rows import StepRows
from tandem.mechanisms.compressed_attention.gpu.append import turned
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.compressed_attention.weights import CompressedWeights
from tandem.mechanisms.latent.gpu.per_head import precision

HEADS = 16  # of a program: the fewest that tensor cores take
KEYS, FEW_KEYS = 32, 16  # at a time; and where there is little shared memory, as on a GeForce
MANY_BYTES = 160 << 10  # of it
PROGRAMS = 528  # as many are wanted: four for each multiprocessor of an H100
VARYING = ["most", "table_width"]  # with the context: else each kind of number were compiled anew


class EntriesSeen(NamedTuple):
    """pages [pages, n, D] of entries; chosen int32 [T, most], rows of the flattened pages; None: all of a sequence's,
    as `StepRows.tables` says. most: that a row may see; stride: tokens of an entry."""

    pages: Tensor
    chosen: Tensor | None
    most: int
    stride: int


@triton.jit(do_not_specialize=VARYING)
def _attend(q, ring, entries, chosen, tables, positions, slots, sums, tops, totals, scale, most, table_width, ring_slot,
            WINDOW: tl.constexpr, RING: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, CHOSEN: tl.constexpr,
            POOLED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
            WIDE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    group, part, t = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parts = tl.num_programs(1)
    h, d = group * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    position, slot = tl.load(positions + t), tl.load(slots + t)
    own = tl.minimum(position + 1, WINDOW).to(tl.int32)
    count, oldest = own, ((position + 1 - own) % RING).to(tl.int32)
    if POOLED:
        count += tl.minimum((position + 1) // STRIDE, most).to(tl.int32)
    valid = (h < HEADS)[:, None] & (d < DIM)[None, :]
    x = tl.load(q + (t * HEADS + h)[:, None] * DIM + d[None, :], valid, other=0.0)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total, acc = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, WIDE], tl.float32)
    for start in range(part * KEYS, count, parts * KEYS):
        j = start + tl.arange(0, KEYS)
        mask = (j < count)[:, None] & (d < DIM)[None, :]
        place = tl.where(oldest + j < RING, oldest + j, oldest + j - RING)
        k = tl.load(ring + slot * ring_slot + place[:, None] * DIM + d[None, :], mask & (j < own)[:, None], other=0.0)
        if POOLED:
            e = tl.maximum(j - own, 0)
            pooled = (j >= own) & (j < count)
            if CHOSEN:
                entry = tl.load(chosen + t * most + e, pooled, other=0).to(tl.int64)
            else:
                page = tl.load(tables + t * table_width + e // PAGE, pooled, other=0).to(tl.int64)
                entry = page * PAGE + e % PAGE
            mask = pooled[:, None] & (d < DIM)[None, :]
            other = tl.load(entries + entry[:, None] * DIM + d[None, :], mask, other=0.0)
            k = tl.where(pooled[:, None], other, k)
        scores = tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where((j < count)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights, before = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        total = total * before + tl.sum(weights, 1)
        acc = acc * before[:, None] + tl.dot(weights.to(k.dtype), k, input_precision=PRECISION)
        top = higher
    at = (t * HEADS + h) * parts + part
    tl.store(tops + at, top, h < HEADS)
    tl.store(totals + at, total, h < HEADS)
    tl.store(sums + at[:, None] * DIM + d[None, :], acc, valid)


@triton.jit(do_not_specialize=["parts"])
def _merge(sums, tops, totals, sinks, cos, sin, positions, out, parts, HEADS: tl.constexpr, DIM: tl.constexpr,
           PAIRS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Parts of a head's result, with its sink, which has no value; then its channels turn back."""
    begin(OVERLAP)
    h, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, p, i = (t * HEADS + h) * parts, tl.arange(0, PARTS), tl.arange(0, BLOCK)
    inside, sink = i < DIM // 2, tl.load(sinks + h).to(tl.float32)
    top = tl.load(tops + first + p, p < parts, other=float("-inf"))
    most = tl.maximum(tl.max(top), sink)
    shares = tl.exp(top - most)
    total = tl.sum(shares * tl.load(totals + first + p, p < parts, other=0.0)) + tl.exp(sink - most)
    a, b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        share = tl.exp(tl.load(tops + first + part) - most) / total
        row = sums + (first + part) * DIM + 2 * i
        a += share * tl.load(row, inside, other=0.0)
        b += share * tl.load(row + 1, inside, other=0.0)
    kind: tl.constexpr = out.dtype.element_ty
    angle = tl.load(positions + t) * PAIRS
    a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
    a, b = turned(a, b, cos + angle, sin + angle, i, inside, DIM // 2, PAIRS, True)
    to = out + (t * HEADS + h) * DIM + 2 * i
    tl.store(to, a.to(kind), inside)
    tl.store(to + 1, b.to(kind), inside)


def attend(
    q: Tensor, rows: StepRows, shape: CompressedAttention, weights: CompressedWeights, ring: Tensor,
    visible: EntriesSeen | None,
) -> Tensor:
    """q [T, H * D], turned, over the rings and entries -> [T, H * D], turned back."""
    count, heads, dim = len(q), shape.heads, shape.dim
    groups, most = triton.cdiv(heads, HEADS), shape.window + (0 if visible is None else visible.most)
    keys = KEYS if shared_bytes(q.device) >= MANY_BYTES else FEW_KEYS
    parts = max(1, min(triton.cdiv(most, keys), triton.cdiv(PROGRAMS, count * groups)))
    sums = q.new_empty((count, heads, parts, dim), dtype=torch.float32)
    tops, totals = sums.new_empty(2, count, heads, parts)
    entries = ring if visible is None else visible.pages
    chosen = None if visible is None else visible.chosen
    _attend[(groups, parts, count)](
        q, ring, entries, rows.tables if chosen is None else chosen, rows.tables, rows.positions, rows.slots, sums,
        tops, totals, shape.scale, 0 if visible is None else visible.most, rows.tables.shape[1], ring.stride(0),
        WINDOW=shape.window, RING=ring.shape[1], STRIDE=1 if visible is None else visible.stride, PAGE=entries.shape[1],
        CHOSEN=chosen is not None, POOLED=visible is not None, HEADS=heads, DIM=dim, BLOCK=HEADS, KEYS=keys,
        WIDE=max(16, triton.next_power_of_2(dim)), PRECISION=precision(q), num_warps=4, **overlapped(q.device),
    )  # fmt: skip
    out = torch.empty_like(q)
    _merge[(heads, count)](
        sums, tops, totals, weights.sinks, weights.cos, weights.sin, rows.positions, out, parts, HEADS=heads, DIM=dim,
        PAIRS=weights.cos.shape[1], BLOCK=triton.next_power_of_2(dim // 2), PARTS=triton.next_power_of_2(parts),
        num_warps=4, **overlapped(q.device),
    )  # fmt: skip
    return out
