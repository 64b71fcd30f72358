"""Attention of a prompt's rows to a window and to entries: a program has a row and a block of its heads.

All heads share a row's keys, so these are read once for a block of heads, and are values, too. Keys of a window lie in
the sequence's ring, or among the new rows of the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.gpu.shared_memory import shared_bytes
from tandem.kernels.step_rows import StepRows
from tandem.mechanisms.compressed_attention.gpu.append import turned
from tandem.mechanisms.compressed_attention.gpu.attend import EntriesSeen
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.compressed_attention.weights import CompressedWeights
from tandem.mechanisms.latent.gpu.per_head import precision

STAGES = 2  # blocks of keys on their way
WIDE_HEADS, WIDE_KEYS = 64, 32  # of a program, and keys at a time
FEW_HEADS, FEW_KEYS = 16, 16
WIDE_BYTES = 200 << 10  # of shared memory, from which many heads and blocks of keys have room
TURNED_HEADS = 16  # of a program
VARYING = ["most", "table_width"]  # with the context: else each kind of number were compiled anew


@triton.jit
def _turn_rows(x, positions, cos, sin, HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
               BLOCK: tl.constexpr, WIDTH: tl.constexpr, BACK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    h, i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)[None, :]
    inside, angle = (h < HEADS) & (i < PAIRS), tl.load(positions + t) * PAIRS
    at = x + (t * HEADS + h) * DIM + DIM - 2 * PAIRS + 2 * i
    a = tl.load(at, inside, other=0.0).to(tl.float32)
    b = tl.load(at + 1, inside, other=0.0).to(tl.float32)
    a, b = turned(a, b, cos + angle, sin + angle, i, inside, PAIRS, PAIRS, BACK)
    tl.store(at, a.to(x.dtype.element_ty), inside)
    tl.store(at + 1, b.to(x.dtype.element_ty), inside)


def turn_rows(x: Tensor, rows: StepRows, weights: CompressedWeights, back: bool = False) -> Tensor:
    """x [T, n, D], contiguous, whose last channels turn in place, in float32."""
    count, heads, dim = x.shape
    pairs, block = weights.cos.shape[1], min(TURNED_HEADS, triton.next_power_of_2(heads))
    _turn_rows[(count, triton.cdiv(heads, block))](
        x, rows.positions, weights.cos, weights.sin, HEADS=heads, DIM=dim, PAIRS=pairs, BLOCK=block,
        WIDTH=triton.next_power_of_2(pairs), BACK=back, num_warps=1, **overlapped(x.device),
    )  # fmt: skip
    return x


@triton.jit
def _more(x, k, inside, top, total, acc, scale, PRECISION: tl.constexpr):
    """A block of keys k [KEYS, D], of which `inside` count: the highest scores, sums of weights, and weighted sums."""
    scores = tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights, before = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
    total = total * before + tl.sum(weights, 1)
    acc = acc * before[:, None] + tl.dot(weights.to(k.dtype), k, input_precision=PRECISION)
    return higher, total, acc


@triton.jit(do_not_specialize=VARYING)
def _attend_rows(q, new, ring, entries, chosen, tables, positions, sequences, slots, begins, firsts, sinks, out, scale,
                 most, table_width, ring_slot, WINDOW: tl.constexpr, RING: tl.constexpr, STRIDE: tl.constexpr,
                 PAGE: tl.constexpr, CHOSEN: tl.constexpr, POOLED: tl.constexpr, HEADS: tl.constexpr,
                 DIM: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
                 PRECISION: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    groups = (HEADS + BLOCK - 1) // BLOCK  # of heads; all on one axis of the grid: the others end at 65,535 rows
    t, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    h, d, some = group * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE), tl.arange(0, KEYS)
    position, sequence = tl.load(positions + t), tl.load(sequences + t)
    own = tl.minimum(position + 1, WINDOW).to(tl.int32)
    oldest, first = position + 1 - own, tl.load(firsts + sequence)
    new += (tl.load(begins + sequence) - first) * DIM
    ring += tl.load(slots + sequence) * ring_slot
    channels, at = (d < DIM)[None, :], (t * HEADS + h)[:, None] * DIM + d[None, :]
    valid = (h < HEADS)[:, None] & channels
    x = tl.load(q + at, valid, other=0.0)
    top = tl.load(sinks + h, h < HEADS, other=0.0).to(tl.float32)  # a sink counts, and has no value
    total, acc = tl.full([BLOCK], 1.0, tl.float32), tl.zeros([BLOCK, WIDE], tl.float32)
    for start in range(0, own, KEYS):
        inside, place = start + some < own, oldest + start + some
        fresh = (inside & (place >= first))[:, None] & channels
        in_ring = (inside & (place < first))[:, None] & channels
        k = tl.load(new + place[:, None] * DIM + d[None, :], fresh, other=0.0)
        k = tl.where(in_ring, tl.load(ring + (place % RING)[:, None] * DIM + d[None, :], in_ring, other=0.0), k)
        top, total, acc = _more(x, k, inside, top, total, acc, scale, PRECISION)
    if POOLED:
        count = tl.minimum((position + 1) // STRIDE, most).to(tl.int32)
        for start in range(0, count, KEYS):
            e = start + some
            inside = e < count
            if CHOSEN:
                entry = tl.load(chosen + t * most + e, inside, other=0).to(tl.int64)
            else:
                page = tl.load(tables + sequence * table_width + e // PAGE, inside, other=0).to(tl.int64)
                entry = page * PAGE + e % PAGE
            k = tl.load(entries + entry[:, None] * DIM + d[None, :], inside[:, None] & channels, other=0.0)
            top, total, acc = _more(x, k, inside, top, total, acc, scale, PRECISION)
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), valid)


def attend_rows(
    q: Tensor, new: Tensor, rows: StepRows, shape: CompressedAttention, weights: CompressedWeights, ring: Tensor,
    visible: EntriesSeen | None,
) -> Tensor:  # fmt: skip
    """q [T, H * D] and new [T, D], turned; the ring is as it was before these rows -> [T, H, D], not turned back."""
    count, heads, dim = len(q), shape.heads, shape.dim
    many = q.dtype is torch.bfloat16 and shared_bytes(q.device) >= WIDE_BYTES
    block = max(FEW_HEADS, min(WIDE_HEADS if many else FEW_HEADS, triton.next_power_of_2(heads)))
    keys = WIDE_KEYS if block > FEW_HEADS else FEW_KEYS
    out = q.new_empty((count, heads, dim))
    entries, chosen = (ring, None) if visible is None else (visible.pages, visible.chosen)
    _attend_rows[(triton.cdiv(heads, block) * count,)](
        q, new, ring, entries, rows.tables if chosen is None else chosen, rows.tables, rows.positions, rows.sequence,
        rows.slots, rows.begins, rows.first, weights.sinks, out, shape.scale, 0 if visible is None else visible.most,
        rows.tables.shape[1], ring.stride(0), WINDOW=shape.window, RING=ring.shape[1],
        STRIDE=1 if visible is None else visible.stride, PAGE=entries.shape[1], CHOSEN=chosen is not None,
        POOLED=visible is not None, HEADS=heads, DIM=dim, BLOCK=block, KEYS=keys,
        WIDE=max(16, triton.next_power_of_2(dim)), PRECISION=precision(q), num_warps=8 if block > FEW_HEADS else 4,
        num_stages=STAGES, **overlapped(q.device),
    )  # fmt: skip
    return out
