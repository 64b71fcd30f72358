"""Chunks of several rows: blocks of queries, the heads of a group beside each other, walk the keys from the first on.

A row adds its keys in blocks of STEP from position 0 (or the window's first block). The operations are the same whether
all rows of its tile see a block or not. So its result depends neither on the batch nor on where its prompt was cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.attention_decode import LOG2_E, OF_SINKS, How
from tandem.kernels.gpu.shared_memory import shared_bytes

STEP = 64  # keys per turn of the loop
SEQUENCES = 128  # looked through at a time by a tile that asks whose it is
# Differ between steps: Triton would compile anew for 1 and for multiples of 16, a second or more while serving.
VARYING = ["window", "table_width", "first", "sequences"]


class PrefillTile(NamedTuple):
    """rows: queries x heads of a group; stages: blocks of keys in shared memory at a time."""

    rows: int
    warps: int
    stages: int

    def shared_bytes(self, dim: int) -> int:
        """Queries, keys and values in bfloat16, and what reductions take."""
        return 2 * dim * (self.rows + self.stages * 2 * STEP) + (1 << 10)


TILES = (
    PrefillTile(128, 8, 3),
    PrefillTile(64, 4, 2),
    PrefillTile(64, 4, 1),
)  # the fastest first; 129, 81 and 49 KB with heads of 128


@triton.jit
def sequence_of(starts, sequences, block, QUERIES: tl.constexpr, AT_ONCE: tl.constexpr):
    """Which sequence block `block` of queries belongs to, and its number there; (sequences, 0) past the last."""
    sequence, skipped, before = 0, 0, 0
    for first in range(0, sequences, AT_ONCE):
        s = first + tl.arange(0, AT_ONCE)
        inside = s < sequences
        rows = tl.load(starts + s + 1, inside, other=0) - tl.load(starts + s, inside, other=0)
        blocks = tl.where(inside, (rows + QUERIES - 1) // QUERIES, 0)
        passed = inside & (before + tl.cumsum(blocks, 0) <= block)
        sequence += tl.sum(passed.to(tl.int32))
        skipped += tl.sum(tl.where(passed, blocks, 0))
        before += tl.sum(blocks)
    return sequence, block - skipped


@triton.jit
def _attend(x, k, v, visible, m, total, acc, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one block of keys: x [M, D], k [N, D], v [N, E], visible [M, N] if MASKED."""
    scores = tl.dot(x, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    safe = tl.where(top == float("-inf"), 0.0, top) if MASKED else top  # a row that sees nothing yet
    p = tl.exp2(tl.fma(scores, scale, -safe[:, None]))  # fma by name: masked or not, the same rounding
    shrink = tl.exp2(m - safe)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def _walk(x, k_pages, v_pages, table, position, begin, end, last, m, total, acc, scale, window, g,
          KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
          VALUE_BLOCK: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Keys begin … end - 1; `last` is past the last key that there is."""
    d, e = tl.arange(0, BLOCK), tl.arange(0, VALUE_BLOCK)
    ahead = begin + tl.arange(0, STEP)
    page = tl.load(table + ahead // PAGE, ahead < last, other=0)
    for start in range(begin, end, STEP):
        keys = start + tl.arange(0, STEP)
        rows = (page.to(tl.int64) * PAGE + keys % PAGE) * KV_HEADS + g
        ahead = keys + STEP
        page = tl.load(table + ahead // PAGE, ahead < last, other=0)  # a turn early, as in decoding
        key_mask, value_mask = (d < DIM)[None, :], (e < VALUE)[None, :]
        visible = True
        if MASKED:
            key_mask, value_mask = (keys < last)[:, None] & key_mask, (keys < last)[:, None] & value_mask
            age = position[:, None] - keys[None, :]
            visible = (age >= 0) & ((window <= 0) | (age < window))
        k = tl.load(k_pages + rows[:, None] * DIM + d[None, :], key_mask, other=0.0)
        v = tl.load(v_pages + rows[:, None] * VALUE + e[None, :], value_mask, other=0.0)
        m, total, acc = _attend(x, k.to(x.dtype), v.to(x.dtype), visible, m, total, acc, scale, MASKED, PRECISION)
    return m, total, acc


@triton.jit(do_not_specialize=VARYING)
def _prefill(q, k_pages, v_pages, tables, starts, positions, sinks, out, scale, window, table_width, first, sequences,
             HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, PAGE: tl.constexpr,
             QUERIES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
             STEP: tl.constexpr, AT_ONCE: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    block = (
        tl.num_programs(0) - 1 - tl.program_id(0)
    )  # the longest first: the short ones fill the gaps at the end
    s, block = sequence_of(starts + first, sequences - first, block, QUERIES, AT_ONCE)
    s += first
    if s >= sequences:
        return
    g = tl.program_id(1)
    SHARE: tl.constexpr = HEADS // KV_HEADS
    r, d = tl.arange(0, QUERIES * GROUP), tl.arange(0, BLOCK)
    t = tl.load(starts + s) + block * QUERIES + r // GROUP
    ok = (t < tl.load(starts + s + 1)) & (r % GROUP < SHARE)
    row = t.to(tl.int64) * HEADS + g * SHARE + r % GROUP
    x = tl.load(q + row[:, None] * DIM + d[None, :], ok[:, None] & (d < DIM)[None, :], other=0.0)
    position = tl.load(positions + t, ok, other=-1).to(tl.int32)
    end = tl.max(position) + 1
    lowest = tl.min(tl.where(ok, position, end))
    begin = tl.where(window > 0, tl.maximum(lowest - window + 1, 0) // STEP * STEP, 0)
    plain_end = tl.where(window > 0, begin, (lowest + 1) // STEP * STEP)  # all rows see all keys before it
    table = tables + s.to(tl.int64) * table_width
    m = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    acc = tl.zeros([QUERIES * GROUP, VALUE_BLOCK], tl.float32)
    m, total, acc = _walk(x, k_pages, v_pages, table, position, begin, plain_end, end, m, total, acc, scale, window, g,
                          KV_HEADS, DIM, VALUE, PAGE, BLOCK, VALUE_BLOCK, STEP, False, PRECISION)  # fmt: skip
    m, total, acc = _walk(x, k_pages, v_pages, table, position, plain_end, end, end, m, total, acc, scale, window, g,
                          KV_HEADS, DIM, VALUE, PAGE, BLOCK, VALUE_BLOCK, STEP, True, PRECISION)  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + g * SHARE + r % GROUP, r % GROUP < SHARE, other=0.0) * OF_SINKS
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.exp2(sink - top)
        acc *= shrink[:, None]
    e = tl.arange(0, VALUE_BLOCK)
    at, real = row[:, None] * VALUE + e[None, :], ok[:, None] & (e < VALUE)[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), real)


def tile_of(device: torch.device, dim: int) -> PrefillTile:
    """The fastest tile that fits the GPU; the last one if none does."""
    return next((tile for tile in TILES if tile.shared_bytes(dim) <= shared_bytes(device)), TILES[-1])


def prefill(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    batch: KernelBatch,
    how: How,
    first: int,
    out: Tensor,
) -> None:
    """All sequences from `first` on; those before have one row each."""
    scale, window, sinks = how
    heads, dim = q.shape[1:]
    _, page, kv_heads, _ = pages[0].shape
    rows, sequences = q.shape[0] - first, batch.seq_lens.shape[0]
    value, group = pages[1].shape[3], triton.next_power_of_2(heads // kv_heads)
    block, values = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value))
    tile = tile_of(q.device, block)
    queries = max(1, tile.rows // group)
    _prefill[(rows // queries + sequences - first, kv_heads)](
        q, *pages, batch.block_tables, batch.query_starts, batch.positions, q if sinks is None else sinks, out,
        scale * LOG2_E, window, batch.block_tables.shape[1], first, sequences,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, VALUE=value, PAGE=page, QUERIES=queries, GROUP=group, BLOCK=block,
        VALUE_BLOCK=values, STEP=STEP, AT_ONCE=SEQUENCES,
        SINKS=sinks is not None, PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
