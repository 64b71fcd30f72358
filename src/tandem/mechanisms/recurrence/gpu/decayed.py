"""Rows of a chunk to each other, where each channel of a key decays by itself (arXiv 2510.26692).

With L the logarithms of decays, row t sees row i < t through the sum over channels of q_t k_i e^(L_i+1 + ... + L_t). No
product of two matrices is that: one of them would grow beyond float32. So there are blocks of 16 rows. Within one, its
rows go back and fade by what they pass (`within_blocks`). Of an earlier block, keys fade up to their block's end, and
the product is one of matrices (`across_blocks`). All that multiplies is at most 1, and no logarithms are subtracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.gpu.attention_prefill import sequence_of

SMALL = 16  # rows of a block


@triton.jit
def number_of(chunk, s, CHUNK: tl.constexpr):
    """Number of the chunk of sequence s that begins at row `chunk`: no two have the same."""
    return (chunk // CHUNK + s).to(tl.int64)


@triton.jit
def _put(alike, query_pairs, products, of_heads, column, inside, asks, CHUNK: tl.constexpr):
    at, mask = of_heads[:, None] * CHUNK + column[None, :], inside[:, None] & (column >= 0)[None, :]
    tl.store(alike + at, products, mask & (asks == 0)[:, None])
    tl.store(query_pairs + at, products, mask & (asks == 1)[:, None])


@triton.jit(do_not_specialize=["first", "sequences"])
def within_blocks(queries, written, decay, beta, alike, query_scores, queries_decayed, keys_decayed, ends, totals,
                  starts, first, sequences, HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr,
                  DECAYS: tl.constexpr, KB: tl.constexpr, CHUNK: tl.constexpr, SMALL: tl.constexpr,
                  AT_ONCE: tl.constexpr):  # fmt: skip
    """alike: written to written, times the row's beta; query_scores: queries to written; both float32 [T, HEADS,
    CHUNK]: a row's columns are its chunk's rows. What is asked, and written times beta, faded since the block's begin;
    ends: written, faded to the block's end; all [T, HEADS, KEYS]. totals [blocks, HEADS, KEYS]: what a block multiplies
    with."""
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    if s + first >= sequences:
        return
    head, small, GROUPS = tl.program_id(1), tl.program_id(2), HEADS // GROUP
    chunk, end = tl.load(starts + s + first) + block * CHUNK, tl.load(starts + s + first + 1)
    own = chunk + small * SMALL
    if own >= end:
        return
    r, i, c = tl.arange(0, 2 * SMALL), tl.arange(0, SMALL), tl.arange(0, KB)
    t, asks = r % SMALL, r // SMALL
    inside, rows = own + t < end, (own + t).to(tl.int64)
    of_heads, mask = rows * HEADS + head, inside[:, None] & (c < KEYS)[None, :]
    of_k, of_q = mask & (asks == 0)[:, None], mask & (asks == 1)[:, None]
    at = (rows[:, None] * GROUPS + head // GROUP) * KEYS + c[None, :]
    faded = tl.load(written + at, of_k, other=0.0) * tl.load(beta + of_heads, inside, other=0.0)[:, None]
    faded += tl.load(queries + at, of_q, other=0.0)  # one of the two is 0
    products, total = tl.zeros([2 * SMALL, SMALL], tl.float32), tl.full([KB], 1.0, tl.float32)
    for back in tl.static_range(SMALL):
        near = SMALL - 1 - back
        row, real = (own + near).to(tl.int64), c < tl.where(own + near < end, KEYS, 0)
        key = tl.load(written + (row * GROUPS + head // GROUP) * KEYS + c, real, other=0.0)
        fade = tl.exp(tl.load(decay + (row * HEADS + head) * DECAYS + c % DECAYS, real, other=0.0))
        sees = (i == near)[None, :] & (t + asks > near)[:, None]
        products = tl.where(sees, tl.sum(faded * key[None, :], 1)[:, None], products)
        faded *= tl.where((t >= near)[:, None], fade[None, :], 1.0)
        tl.store(ends + (row * HEADS + head) * KEYS + c, key * total, real)
        total *= fade
    _put(alike, query_scores, products, of_heads, small * SMALL + i, inside, asks, CHUNK)
    to = of_heads[:, None] * KEYS + c[None, :]
    tl.store(keys_decayed + to, faded, of_k)
    tl.store(queries_decayed + to, faded, of_q)
    number = number_of(chunk, s, CHUNK) * (CHUNK // SMALL) + small
    tl.store(totals + (number * HEADS + head) * KEYS + c, total, c < KEYS)


@triton.jit(do_not_specialize=["first", "sequences"])
def across_blocks(alike, query_scores, queries_decayed, keys_decayed, ends, totals, left, fade, starts, first,
                  sequences, HEADS: tl.constexpr, KEYS: tl.constexpr, KB: tl.constexpr, CHUNK: tl.constexpr,
                  SMALL: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Afterwards, what is asked and written has faded since the chunk's begin. left: written, faded to the chunk's end;
    fade [chunks, HEADS, KEYS]: what a chunk multiplies with. Blocks behind a row's own are left as they are."""
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    if s + first >= sequences:
        return
    head, small, BLOCKS = tl.program_id(1), tl.program_id(2), CHUNK // SMALL
    chunk, end = tl.load(starts + s + first) + block * CHUNK, tl.load(starts + s + first + 1)
    own = chunk + small * SMALL
    if own >= end:
        return
    r, i, c = tl.arange(0, 2 * SMALL), tl.arange(0, SMALL), tl.arange(0, KB)
    t, asks, in_k = r % SMALL, r // SMALL, c < KEYS
    inside, of_heads = own + t < end, (own + t).to(tl.int64) * HEADS + head
    of_k = (inside & (asks == 0))[:, None] & in_k[None, :]
    of_q, at = (inside & (asks == 1))[:, None] & in_k[None, :], of_heads[:, None] * KEYS + c[None, :]
    faded = tl.load(keys_decayed + at, of_k, other=0.0) + tl.load(queries_decayed + at, of_q, other=0.0)
    of_chunk = number_of(chunk, s, CHUNK)
    blocks = totals + (of_chunk * BLOCKS * HEADS + head) * KEYS + c
    for back in range(small):
        before = small - 1 - back
        far = (chunk + before * SMALL + i).to(tl.int64) * HEADS + head
        keys = tl.load(ends + far[:, None] * KEYS + c[None, :], in_k[None, :], other=0.0)
        product = tl.dot(faded, tl.trans(keys), input_precision=PRECISION)
        _put(alike, query_scores, product, of_heads, before * SMALL + i, inside, asks, CHUNK)
        faded *= tl.load(blocks + before * HEADS * KEYS, in_k, other=0.0)[None, :]
    tl.store(keys_decayed + at, faded, of_k)
    tl.store(queries_decayed + at, faded, of_q)
    rest = tl.full([KB], 1.0, tl.float32)
    for behind in range(small + 1, BLOCKS):
        mask = c < tl.where(chunk + behind * SMALL < end, KEYS, 0)
        rest *= tl.load(blocks + behind * HEADS * KEYS, mask, other=1.0)
    own_at = (own + i).to(tl.int64)[:, None] * HEADS * KEYS + head * KEYS + c[None, :]
    mask = (own + i < end)[:, None] & in_k[None, :]
    tl.store(left + own_at, tl.load(ends + own_at, mask, other=0.0) * rest[None, :], mask)
    if small == 0:
        tl.store(fade + (of_chunk * HEADS + head) * KEYS + c, rest * tl.load(blocks, in_k, other=0.0), in_k)
