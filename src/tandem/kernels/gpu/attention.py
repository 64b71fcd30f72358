"""Attention over paged keys and values: split over the keys for decoding, blocks of queries for prefill.

Online softmax in float32; the query heads that share a key head are rows of one tile. A row's result depends on its own
length and on whether it decodes, not on the batch: decoding cuts its keys into SPLITS parts by that length, prefill
always starts at block boundaries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.ops import BatchLayout

SPLITS = 32  # parts of a decoding row's keys: x 4 key heads they fill a large GPU with one sequence
KEYS = 64  # keys per step of the loop
QUERY_ROWS = 64  # rows (queries x heads of a group) of a prefill tile
SEQUENCES = 128  # looked through at a time by a prefill tile that asks whose it is
# Differ between steps: Triton would compile anew for 1 and for multiples of 16, a second or more while serving.
VARYING = ["window", "table_width", "first", "sequences"]


@triton.jit
def _attend(q, k, v, visible, m, total, acc, scale, PRECISION: tl.constexpr):
    """Adds one block of keys: q [M, D], k [D, N], v [N, D], visible [M, N]."""
    scores = tl.where(visible, tl.dot(q, k, input_precision=PRECISION) * scale, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)  # a row that sees nothing yet
    p = tl.exp(scores - safe[:, None])
    shrink = tl.exp(m - safe)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def _page_rows(table, keys, inside, PAGE: tl.constexpr):
    """Rows of the cache where a sequence's keys lie."""
    return tl.load(table + keys // PAGE, inside, other=0).to(tl.int64) * PAGE + keys % PAGE


@triton.jit(do_not_specialize=VARYING[:2])
def _decode(q, k_pages, v_pages, tables, lens, partial, stats, scale, window, table_width,
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
            ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    s, g, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = HEADS // KV_HEADS
    n = tl.load(lens + s)
    each = tl.cdiv(tl.cdiv(n, PARTS), STEP) * STEP
    first = tl.where(window > 0, tl.maximum(n - window, 0), 0)
    begin, end = tl.maximum(part * each, first), tl.minimum(n, part * each + each)
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    head, real = g * SHARE + r, (r < SHARE)[:, None] & (d < DIM)[None, :]
    x = tl.load(q + (s * HEADS + head)[:, None] * DIM + d[None, :], real, other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(begin, end, STEP):
        keys = start + tl.arange(0, STEP)
        rows = (_page_rows(tables + s * table_width, keys, keys < end, PAGE) * KV_HEADS + g) * DIM
        k = tl.load(
            k_pages + rows[None, :] + d[:, None], (keys < end)[None, :] & (d < DIM)[:, None], other=0.0
        )
        v = tl.load(
            v_pages + rows[:, None] + d[None, :], (keys < end)[:, None] & (d < DIM)[None, :], other=0.0
        )
        m, total, acc = _attend(x, k, v, (keys < end)[None, :], m, total, acc, scale, PRECISION)
    out = (s * HEADS + head) * PARTS + part
    tl.store(partial + out[:, None] * DIM + d[None, :], acc, real)
    tl.store(stats + out * 2, m, r < SHARE)
    tl.store(stats + out * 2 + 1, total, r < SHARE)


@triton.jit
def _merge(partial, stats, out, DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    m = tl.load(stats + (row * PARTS + part) * 2)
    total = tl.load(stats + (row * PARTS + part) * 2 + 1)
    shrink = tl.where(total > 0, tl.exp(m - tl.max(m)), 0.0)
    used = (total > 0)[:, None] & (d < DIM)[None, :]
    acc = tl.load(partial + (row * PARTS + part)[:, None] * DIM + d[None, :], used, other=0.0)
    y = tl.sum(acc * shrink[:, None], 0) / tl.sum(total * shrink)
    tl.store(out + row * DIM + d, y.to(out.dtype.element_ty), d < DIM)


@triton.jit
def _sequence_of(starts, sequences, block, QUERIES: tl.constexpr, AT_ONCE: tl.constexpr):
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


@triton.jit(do_not_specialize=VARYING)
def _prefill(q, k_pages, v_pages, tables, starts, positions, out, scale, window, table_width, first, sequences,
             HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
             QUERIES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
             AT_ONCE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    s, block = _sequence_of(starts + first, sequences - first, tl.program_id(0), QUERIES, AT_ONCE)
    s += first
    if s >= sequences:
        return
    g = tl.program_id(1)
    SHARE: tl.constexpr = HEADS // KV_HEADS
    r, d = tl.arange(0, QUERIES * GROUP), tl.arange(0, BLOCK)
    t = tl.load(starts + s) + block * QUERIES + r // GROUP
    ok = (t < tl.load(starts + s + 1)) & (r % GROUP < SHARE)
    at = (t.to(tl.int64) * HEADS + g * SHARE + r % GROUP)[:, None] * DIM + d[None, :]
    real = ok[:, None] & (d < DIM)[None, :]
    x = tl.load(q + at, real, other=0.0)
    position = tl.load(positions + t, ok, other=-1).to(tl.int32)
    end = tl.max(position) + 1
    lowest = tl.min(tl.where(ok, position, end))
    begin = tl.where(window > 0, tl.maximum(lowest - window + 1, 0) // STEP * STEP, 0)
    m = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    acc = tl.zeros([QUERIES * GROUP, BLOCK], tl.float32)
    for start in range(begin, end, STEP):
        keys = start + tl.arange(0, STEP)
        age = position[:, None] - keys[None, :]
        rows = (
            _page_rows(tables + s.to(tl.int64) * table_width, keys, keys < end, PAGE) * KV_HEADS + g
        ) * DIM
        k = tl.load(
            k_pages + rows[None, :] + d[:, None], (keys < end)[None, :] & (d < DIM)[:, None], other=0.0
        )
        v = tl.load(
            v_pages + rows[:, None] + d[None, :], (keys < end)[:, None] & (d < DIM)[None, :], other=0.0
        )
        visible = (age >= 0) & ((window <= 0) | (age < window))
        m, total, acc = _attend(x, k, v, visible, m, total, acc, scale, PRECISION)
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), real)


def _common(q: Tensor, k_pages: Tensor) -> dict[str, int | str]:
    return {
        "HEADS": q.shape[1], "KV_HEADS": k_pages.shape[2], "DIM": q.shape[2], "PAGE": k_pages.shape[1],
        "BLOCK": max(16, triton.next_power_of_2(q.shape[2])), "STEP": KEYS,
        "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
    }  # fmt: skip


def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: BatchLayout, scale: float, window: int
) -> Tensor:
    """Any mixture of chunks: q [T, H, D] -> [T, H * D]. The first sequences with one row each are decoded: a tile of
    queries would walk all keys of such a row alone."""
    rows, sequences = q.shape[0], batch.seq_lens.shape[0]
    single = sequences if rows == sequences else batch.single_rows
    out = q.new_empty((rows, q.shape[1] * q.shape[2]))
    pages = k_pages, v_pages
    if single:
        _run_decode(q, pages, batch, scale, window, single, out)
    if single < sequences:
        _run_prefill(q, pages, batch, scale, window, single, out)
    return out


def _run_decode(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    batch: BatchLayout,
    scale: float,
    window: int,
    rows: int,
    out: Tensor,
) -> None:
    """One new token of each of the first `rows` sequences."""
    k_pages, v_pages = pages
    heads, dim = q.shape[1:]
    partial = q.new_empty((rows, heads, SPLITS, dim), dtype=torch.float32)
    stats = q.new_empty((rows, heads, SPLITS, 2), dtype=torch.float32)
    share = heads // k_pages.shape[2]
    _decode[(rows, k_pages.shape[2], SPLITS)](
        q, k_pages, v_pages, batch.block_tables, batch.seq_lens, partial, stats, scale, window,
        batch.block_tables.shape[1], PARTS=SPLITS, ROWS=max(16, triton.next_power_of_2(share)), **_common(q, k_pages),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge[(rows * heads,)](
        partial, stats, out, DIM=dim, PARTS=SPLITS, BLOCK=triton.next_power_of_2(dim), num_warps=4
    )


def _run_prefill(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    batch: BatchLayout,
    scale: float,
    window: int,
    first: int,
    out: Tensor,
) -> None:
    """All sequences from `first` on; those before have one row each."""
    k_pages, v_pages = pages
    rows, sequences = q.shape[0] - first, batch.seq_lens.shape[0]
    group = triton.next_power_of_2(q.shape[1] // k_pages.shape[2])
    queries = max(1, QUERY_ROWS // group)
    _prefill[(rows // queries + sequences - first, k_pages.shape[2])](
        q, k_pages, v_pages, batch.block_tables, batch.query_starts, batch.positions, out, scale, window,
        batch.block_tables.shape[1], first, sequences, QUERIES=queries, GROUP=group, AT_ONCE=SEQUENCES,
        **_common(q, k_pages), num_warps=4, num_stages=2,
    )  # fmt: skip
