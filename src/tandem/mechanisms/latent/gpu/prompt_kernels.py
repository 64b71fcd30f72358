"""Keys and values of each head from the latents of a prompt, attention over them, and the sum of its pieces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.attention_decode import LOG2_E
from tandem.kernels.gpu.shared_memory import shared_bytes
from tandem.mechanisms.latent.absorbed import LatentSizes
from tandem.mechanisms.latent.gpu.decode import block_of
from tandem.mechanisms.latent.gpu.per_head import precision

ROWS = 8  # of a program that copies
KEYS = 64  # per turn of the loop
TILES = ((128, 8, 2), (64, 4, 2), (64, 4, 1), (32, 4, 1))  # queries, warps, stages; the fastest first


@triton.jit(do_not_specialize=["first", "end", "rows"], do_not_specialize_on_alignment=["table"])
def _gather(latents, table, out, first, end, rows, PAGE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    i, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    position = first + i
    mask = position < end
    page = tl.load(table + position // PAGE, mask, other=0).to(tl.int64)
    row = (page * PAGE + position % PAGE) * WIDTH
    x = tl.load(latents + row[:, None] + d, mask[:, None] & (d < WIDTH), other=0.0)
    tl.store(out + i.to(tl.int64)[:, None] * WIDTH + d, x, (i < rows)[:, None] & (d < WIDTH))


@triton.jit(do_not_specialize=["rows"])
def _join(straight, turned, out, rows, straight_row, straight_head, turned_row, HEADS: tl.constexpr,
          NOPE: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
          SMALL: tl.constexpr):  # fmt: skip
    h, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    mask, to = (t < rows)[:, None], out + (t[:, None] * HEADS + h) * (NOPE + ROPE)
    d = tl.arange(0, BLOCK)[None, :]
    inside = mask & (d < NOPE)
    tl.store(to + d, tl.load(straight + h * straight_head + t[:, None] * straight_row + d, inside), inside)
    if ROPE:
        e = tl.arange(0, SMALL)[None, :]
        rotary = mask & (e < ROPE)
        tl.store(to + NOPE + e, tl.load(turned + t[:, None] * turned_row + e, rotary), rotary)


@triton.jit
def _attend(x, y, k, r, v, visible, m, total, acc, scale, ROPE: tl.constexpr, PRECISION: tl.constexpr):
    """Adds a block of keys, k [N, nope] and r [N, rope], and values v [N, value]; visible [M, N]. Without ROPE nothing
    turns."""
    scores = tl.dot(x, tl.trans(k), input_precision=PRECISION)
    if ROPE:
        scores = tl.dot(y, tl.trans(r), scores, input_precision=PRECISION)
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1) * scale)  # finite: every row sees the first key
    p = tl.exp2(scores * scale - top[:, None])
    shrink = tl.exp2(m - top)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return top, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["rows", "keys"])
def _prompt(q, k, v, out, lse, rows, keys, scale, v_row, v_head,
            HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, CAUSAL: tl.constexpr,
            QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr,
            WIDE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    block, h = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)  # the longest first
    WIDTH: tl.constexpr = NOPE + ROPE
    t, n = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    d, e, w = tl.arange(0, BLOCK)[None, :], tl.arange(0, SMALL)[None, :], tl.arange(0, WIDE)[None, :]
    mask, row = (t < rows)[:, None], q + (t.to(tl.int64)[:, None] * HEADS + h) * WIDTH
    x = tl.load(row + d, mask & (d < NOPE), other=0.0)
    y = tl.load(row + NOPE + e, mask & (e < ROPE), other=0.0)
    m = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, WIDE], tl.float32)
    end = tl.minimum(keys, (block + 1) * QUERIES) if CAUSAL else keys
    for start in range(0, end, KEYS):
        j = start + n
        at, inside = k + (j.to(tl.int64)[:, None] * HEADS + h) * WIDTH, (j < keys)[:, None]
        kk = tl.load(at + d, inside & (d < NOPE), other=0.0)
        rr = tl.load(at + NOPE + e, inside & (e < ROPE), other=0.0)
        vv = tl.load(v + h * v_head + j.to(tl.int64)[:, None] * v_row + w, inside & (w < VALUE), other=0.0)
        visible = (j < keys)[None, :]
        if CAUSAL:
            visible &= j[None, :] <= t[:, None]
        m, total, acc = _attend(x, y, kk, rr, vv, visible, m, total, acc, scale, ROPE, PRECISION)
    to = h * rows + t
    tl.store(lse + to, (m + tl.log2(total)) / 1.4426950408889634, t < rows)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (t.to(tl.int64)[:, None] * HEADS + h) * VALUE + w, result, mask & (w < VALUE))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["lse"])
def _fold(part, lse, acc, top, total, out, rows, part_row, part_head, lse_head, out_row, HEADS: tl.constexpr,
          VALUE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
          LAST: tl.constexpr):  # fmt: skip
    """Adds a piece, weighted by what its keys sum to; the last one divides."""
    h, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    d, mask = tl.arange(0, BLOCK)[None, :], t < rows
    inside, at = mask[:, None] & (d < VALUE), t * HEADS + h
    y = tl.load(part + h * part_head + t[:, None] * part_row + d, inside, other=0.0).to(tl.float32)
    m = tl.load(lse + h * lse_head + t, mask, other=0.0)
    sums = tl.full([ROWS], 1.0, tl.float32)
    if not FIRST:
        before = tl.load(top + at, mask, other=0.0)
        most = tl.maximum(before, m)
        shrink, weight = tl.exp(before - most), tl.exp(m - most)
        sums = tl.load(total + at, mask, other=1.0) * shrink + weight
        y = tl.load(acc + at[:, None] * VALUE + d, inside, other=0.0) * shrink[:, None] + y * weight[:, None]
        m = most
    if LAST:
        to = out + t[:, None] * out_row + h * VALUE + d
        tl.store(to, (y / sums[:, None]).to(out.dtype.element_ty), inside)
    else:
        tl.store(acc + at[:, None] * VALUE + d, y, inside)
        tl.store(top + at, m, mask)
        tl.store(total + at, sums, mask)


def gather(latents: Tensor, table: Tensor, first: int, end: int, rows: int) -> Tensor:
    """Latents of positions first … end - 1 of one sequence, and zeros after them: [rows, width]."""
    page, width = latents.shape[1], latents.shape[3]
    out = latents.new_empty((rows, width))
    block = triton.next_power_of_2(width)
    _gather[(triton.cdiv(rows, ROWS),)](
        latents, table, out, first, end, rows, PAGE=page, WIDTH=width, ROWS=ROWS, BLOCK=block, num_warps=4
    )
    return out


def join(straight: Tensor, turned: Tensor) -> Tensor:
    """Keys of G heads: straight [n, G, nope] of each, turned [n, rope] of all -> [n, G, nope + rope]."""
    rows, heads, nope = straight.shape
    rope = turned.shape[1]
    out = straight.new_empty((rows, heads, nope + rope))
    _join[(heads, triton.cdiv(rows, ROWS))](
        straight, turned, out, rows, straight.stride(0), straight.stride(1), turned.stride(0), HEADS=heads,
        NOPE=nope, ROPE=rope, ROWS=ROWS, BLOCK=triton.next_power_of_2(nope), SMALL=triton.next_power_of_2(max(1, rope)),
        num_warps=4,
    )  # fmt: skip
    return out


def attended(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, sizes: LatentSizes
) -> tuple[Tensor, Tensor]:
    """q [t, G, nope + rope], k [n, G, …], v [n, G, value] -> ([t, G, value], log of sums of exponentials [G, t]).
    causal: row i sees keys 0 … i."""
    rows, heads, _ = q.shape
    out, lse = q.new_empty((rows, heads, sizes.value)), q.new_empty((heads, rows), dtype=torch.float32)
    blocks = block_of(sizes.nope), block_of(sizes.rope), block_of(sizes.value)
    queries, warps, stages = tile_of(q.device, *blocks)
    _prompt[(triton.cdiv(rows, queries), heads)](
        q, k, v, out, lse, rows, len(k), scale * LOG2_E, v.stride(0), v.stride(1), HEADS=heads, NOPE=sizes.nope,
        ROPE=sizes.rope, VALUE=sizes.value, CAUSAL=causal, QUERIES=queries, KEYS=KEYS, BLOCK=blocks[0],
        SMALL=blocks[1], WIDE=blocks[2], PRECISION=precision(q), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def tile_of(device: torch.device, nope: int, rope: int, value: int) -> tuple[int, int, int]:
    """The fastest tile that fits the GPU; the last one if none does."""
    room, width = shared_bytes(device), nope + rope + value
    fits = (t for t in TILES if 2 * (t[0] * (nope + rope) + t[2] * KEYS * width) + (4 << 10) <= room)
    return next(fits, TILES[-1])


class Folded:
    """The sum of pieces of attention over different keys: out [T, G * value] of rows that may lie apart."""

    def __init__(self, out: Tensor, heads: int, pieces: int) -> None:
        self._out, self._heads, self._pieces, self._done = out, heads, pieces, 0
        rows, width = len(out), out.shape[1]
        summed_rows = rows if pieces > 1 else 0
        self._acc = out.new_empty((summed_rows, width), dtype=torch.float32)
        self._top, self._total = out.new_empty((2, summed_rows, heads), dtype=torch.float32)

    def add(self, part: Tensor, lse: Tensor) -> None:
        """part [T, G, value], lse [G, T]: one of `pieces`."""
        rows, heads, value = part.shape
        first, self._done = self._done == 0, self._done + 1
        _fold[(heads, triton.cdiv(rows, ROWS))](
            part, lse, self._acc, self._top, self._total, self._out, rows, part.stride(0), part.stride(1),
            lse.stride(0), self._out.stride(0), HEADS=heads, VALUE=value, ROWS=ROWS,
            BLOCK=triton.next_power_of_2(value), FIRST=first, LAST=self._done == self._pieces, num_warps=4,
        )  # fmt: skip
