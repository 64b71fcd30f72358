"""Decoding rows: one query each against all its keys, which PARTS programs share; a second kernel merges their sums.

Program p takes blocks p, p + PARTS, p + 2 PARTS, … of STEP keys. So all have the same work at any length, and each
knows the pages of its first block before it knows the length. The division depends on the row's length alone, so the
result is the same in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.gpu.shared_memory import shared_bytes
from tandem.spec.gpu_scratch import DECODE_PARTS

PARTS = DECODE_PARTS  # x 4 key heads they fill a large GPU with one sequence
STEP = 64  # keys per turn of the loop
STAGES = 3  # one block of keys in use, two on their way: 70 KB of shared memory with heads of 128
# From so many rows x key heads on, one block on its way is enough, and more programs fit beside each other. One row
# would take half as long again.
MANY_HEADS = 32
LOG2_E = 1.4426950408889634  # exp2 is an instruction, exp is not
OF_SINKS = tl.constexpr(LOG2_E)
How = tuple[float, int, Tensor | None]
"""Scale above 0, window, and sinks: float32 [heads]."""
# Differ between steps: Triton would compile anew for 1 and for multiples of 16, a second or more while serving.
VARYING = ["window", "table_width"]


@triton.jit
def _attend(x, k, v, inside, m, sums, acc, scale, PRECISION: tl.constexpr):
    """Adds one block of keys: x [M, D], k [N, D], v [N, E], inside [N]. sums [M, N] are added up once, at the end."""
    scores = tl.dot(x, tl.trans(k), input_precision=PRECISION)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    safe = tl.where(top == float("-inf"), 0.0, top)  # a block before the window
    p = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(m - safe)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return top, sums * shrink[:, None] + p, acc


@triton.jit(do_not_specialize=VARYING)
def _decode(q, k_pages, v_pages, tables, lens, partial, stats, scale, window, table_width,
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, PAGE: tl.constexpr,
            PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
            STEP: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    s, g, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = HEADS // KV_HEADS
    HOP: tl.constexpr = STEP * PARTS
    table, room = tables + s * table_width, table_width * PAGE
    ahead = part * STEP + tl.arange(0, STEP)
    begin(OVERLAP and PAGE == 1)  # the step itself may have chosen such rows
    page = tl.load(table + ahead // PAGE, ahead < room, other=0)
    n = tl.load(lens + s)
    begin(OVERLAP and PAGE != 1)  # pages and lengths are there before a step starts
    first = tl.where(window > 0, tl.maximum(n - window, 0), 0)
    base = first // STEP * STEP
    if base + part * STEP >= n:
        return
    if base > 0:
        ahead += base
        page = tl.load(table + ahead // PAGE, ahead < room, other=0)
    r, d, e = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, VALUE_BLOCK)
    head, real = g * SHARE + r, (r < SHARE)[:, None] & (d < DIM)[None, :]
    x = tl.load(q + (s * HEADS + head)[:, None] * DIM + d[None, :], real, other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS, STEP], tl.float32)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for start in range(base + part * STEP, n, HOP):
        keys = start + tl.arange(0, STEP)
        rows = (page.to(tl.int64) * PAGE + keys % PAGE) * KV_HEADS + g
        ahead = keys + HOP
        # a turn early, so that the keys' addresses wait for no load and several blocks can be on their way
        page = tl.load(table + ahead // PAGE, ahead < room, other=0)
        inside = (keys >= first) & (keys < n)
        k = tl.load(k_pages + rows[:, None] * DIM + d[None, :], inside[:, None] & (d < DIM)[None, :], other=0.0)
        v = tl.load(v_pages + rows[:, None] * VALUE + e[None, :], inside[:, None] & (e < VALUE)[None, :], other=0.0)
        m, sums, acc = _attend(x, k.to(x.dtype), v.to(x.dtype), inside, m, sums, acc, scale, PRECISION)
    out = (s * HEADS + head) * PARTS + part
    stored = (r < SHARE)[:, None] & (e < VALUE)[None, :]
    tl.store(partial + out[:, None] * VALUE + e[None, :], acc, stored)
    tl.store(stats + out * 2, m, r < SHARE)
    tl.store(stats + out * 2 + 1, tl.sum(sums, 1), r < SHARE)


@triton.jit(do_not_specialize=["window"])
def _merge(partial, stats, lens, sinks, out, window, HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
           PAGE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, SINKS: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    begin(OVERLAP and PAGE == 1)
    n = tl.load(lens + row // HEADS)
    begin(OVERLAP and PAGE != 1)
    first = tl.where(window > 0, tl.maximum(n - window, 0), 0)
    used = part < tl.cdiv(n - first // STEP * STEP, STEP)  # the others have written nothing
    at = row * PARTS + part
    acc = tl.load(partial + at[:, None] * DIM + d[None, :], used[:, None] & (d < DIM)[None, :], other=0.0)
    m = tl.load(stats + at * 2, used, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, used, other=0.0)
    top = tl.max(m)
    if SINKS:
        sink = tl.load(sinks + row % HEADS) * OF_SINKS
        top = tl.maximum(top, sink)
    shrink = tl.exp2(m - top)
    whole = tl.sum(total * shrink)
    if SINKS:
        whole += tl.exp2(sink - top)
    y = tl.sum(acc * shrink[:, None], 0) / whole
    tl.store(out + row * DIM + d, y.to(out.dtype.element_ty), d < DIM)


def _block_bytes(dim: int, stages: int) -> int:
    """Bytes of shared memory: keys and values in bfloat16, and queries, weights and what reductions take."""
    return (stages - 1) * 2 * STEP * dim * 2 + 48 * dim


def decode(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    batch: KernelBatch,
    how: How,
    which: slice,
    out: Tensor,
) -> None:
    """One new token of each of the sequences `which`, those before having one each, too."""
    scale, window, sinks = how
    rows, q, out = which.stop - which.start, q[which], out[which]
    tables, lens = batch.block_tables[which], batch.seq_lens[which]
    heads, dim = q.shape[1:]
    _, page, kv_heads, _ = pages[0].shape
    value = pages[1].shape[3]
    block, values = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value))
    few = rows * kv_heads < MANY_HEADS and _block_bytes(block, STAGES) <= shared_bytes(q.device)
    partial = q.new_empty((rows, heads, PARTS, value), dtype=torch.float32)
    stats = q.new_empty((rows, heads, PARTS, 2), dtype=torch.float32)
    shared = {"HEADS": heads, "PARTS": PARTS, "STEP": STEP, "PAGE": page, **overlapped(q.device)}
    _decode[(rows, kv_heads, PARTS)](
        q, *pages, tables, lens, partial, stats, scale * LOG2_E, window,
        tables.shape[1], KV_HEADS=kv_heads, DIM=dim, VALUE=value,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK=block, VALUE_BLOCK=values,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32", **shared,
        num_warps=4, num_stages=STAGES if few else STAGES - 1,
    )  # fmt: skip
    _merge[(rows * heads,)](
        partial, stats, lens, stats if sinks is None else sinks, out, window, DIM=value, BLOCK=values,
        SINKS=sinks is not None, **shared, num_warps=2,
    )  # fmt: skip
