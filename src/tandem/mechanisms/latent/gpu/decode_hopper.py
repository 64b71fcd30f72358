"""`decode.py`'s first kernel for Hopper (compute capability 9.0), in Gluon: tiles of 64 heads and 64 keys.

Triton lets both warp groups compute all scores, since these go into a second product, and reads queries twice as
often. Here each group takes half of the keys, then half of the values' columns. Sums are the same numbers in the same
order of blocks; the result is for `decode.py`'s second kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

load_async = (
    getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
)  # Triton 3.9, and before
VARYING = ["table_width", "table_row", "parts"]
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _load_block(latents, page, start, n, turned, straight, PAGE: gl.constexpr, WIDE: gl.constexpr,
                SMALL: gl.constexpr):  # fmt: skip
    """Keys start … start + 63, whose pages are page [64], into shared memory; those past n are zeros."""
    WIDTH: gl.constexpr = 64 + 512
    keys = start + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    rows = (page.to(gl.int64) * PAGE + keys % PAGE) * WIDTH
    d = gl.arange(0, 512, gl.SliceLayout(0, WIDE))
    load_async(straight, latents + rows[:, None] + (64 + d)[None, :], (keys < n)[:, None])
    few, e = gl.convert_layout(rows, gl.SliceLayout(1, SMALL)), gl.arange(0, 64, gl.SliceLayout(0, SMALL))
    keys = start + gl.arange(0, 64, gl.SliceLayout(1, SMALL))
    load_async(turned, latents + few[:, None] + e[None, :], (keys < n)[:, None])
    async_copy.commit_group()


@gluon.jit
def _load_queries(x, row, tile, turned, straight, HEADS: gl.constexpr, WIDE: gl.constexpr,
                  SMALL: gl.constexpr):  # fmt: skip
    """Loads the queries of one row and 64 heads into shared memory; those past the last head are zeros."""
    WIDTH: gl.constexpr = 64 + 512
    h, d = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE)), gl.arange(0, 512, gl.SliceLayout(0, WIDE))
    load_async(straight, x + ((row + h) * WIDTH)[:, None] + (64 + d)[None, :], (h < HEADS)[:, None])
    h, e = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SMALL)), gl.arange(0, 64, gl.SliceLayout(0, SMALL))
    load_async(turned, x + ((row + h) * WIDTH)[:, None] + e[None, :], (h < HEADS)[:, None])


@gluon.jit
def _begin(t, n, OVERLAP: gl.constexpr):
    """As `overlap.begin`: t, of which every later address is made, so that no load is moved before it."""
    if OVERLAP:
        t += gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [n], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    return t


@gluon.jit
def _scores(q_turned, q_straight, r, c, start, n, SCORES: gl.constexpr):
    """[64 heads, 64 keys]; -inf past n. Each warp group takes half of the keys."""
    none = gl.zeros([64, 64], gl.float32, SCORES)
    scores = warpgroup_mma(q_turned, r.permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_straight, c.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    inside = start + gl.arange(0, 64, gl.SliceLayout(0, SCORES)) < n
    return gl.where(inside[None, :], scores, float("-inf"))


@gluon.jit
def _store(acc, m, total, partial, stats, row, tile, part, parts, HEADS: gl.constexpr,
           SUMS: gl.constexpr, ROW: gl.constexpr):  # fmt: skip
    h, d = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS)), gl.arange(0, 512, gl.SliceLayout(0, SUMS))
    out = (row + h) * parts + part
    gl.store(partial + out[:, None] * 512 + d[None, :], acc, (h < HEADS)[:, None])
    h = tile * 64 + gl.arange(0, 64, ROW)
    out = (row + h) * parts + part
    gl.store(stats + out * 2, m, h < HEADS)
    gl.store(stats + out * 2 + 1, total, h < HEADS)


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["tables", "lens"])
def decode_hopper(x, latents, tables, lens, partial, stats, scale, table_width, table_row, parts, HEADS: gl.constexpr,
                  PAGE: gl.constexpr, CHOSEN: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    hop = 64 * parts
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    SMALL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    tile, part, t = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(gl.int64)
    if CHOSEN:  # by a kernel of the same step
        t = _begin(t, part, OVERLAP)
    n = gl.load(lens + t)
    if not CHOSEN:
        t = _begin(t, n, OVERLAP)
    if part * 64 >= n:
        return
    q_turned = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    q_straight = gl.allocate_shared_memory(gl.bfloat16, [64, 512], SHARED)
    turned = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    straight = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    _load_queries(x, t * HEADS, tile, q_turned, q_straight, HEADS, WIDE, SMALL)
    table, room, ahead = tables + t * table_row, table_width * PAGE, gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    ahead += part * 64
    page = gl.load(table + ahead // PAGE, ahead < room, other=0)
    _load_block(latents, page, part * 64, n, turned.index(0), straight.index(0), PAGE, WIDE, SMALL)
    ahead += hop
    page = gl.load(table + ahead // PAGE, ahead < room, other=0)  # a turn early: no load waits for another
    m = gl.full([64], float("-inf"), gl.float32, ROW)
    total, acc = gl.zeros([64], gl.float32, ROW), gl.zeros([64, 512], gl.float32, SUMS)
    i = 0
    for start in range(part * 64, n, hop):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()  # the block is there, and nobody reads the one before any more
        if start + hop < n:
            _load_block(
                latents, page, start + hop, n, turned.index(1 - i), straight.index(1 - i), PAGE, WIDE, SMALL
            )
            ahead += hop
            page = gl.load(table + ahead // PAGE, ahead < room, other=0)
        scores = _scores(q_turned, q_straight, turned.index(i), straight.index(i), start, n, SCORES)
        top = gl.maximum(m, gl.max(scores, 1) * scale)
        p, shrink = gl.exp2(scores * scale - top[:, None]), gl.exp2(m - top)
        weights.store(p.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        acc = warpgroup_mma(weights, straight.index(i), acc, is_async=True)
        total = total * shrink + gl.sum(p, 1)
        m = top
        acc = warpgroup_mma_wait(0, deps=[acc])
        i = 1 - i
    _store(acc, m, total, partial, stats, t * HEADS, tile, part, parts, HEADS, SUMS, ROW)
