"""Rows of a chunk to each other, where each channel of a key decays by itself (arXiv 2510.26692).

With L the logarithms of decays, row t sees row i < t through the sum over channels of q_t k_i e^(L_i+1 + ... + L_t). No
product of two matrices is that: one of them would grow beyond float32. So blocks of 16 rows go back through their
chunk, and fade by what they pass. Within its block a row goes row by row. The rows of a block before fade up to its
end, so there a product of matrices follows. All exponents are sums of what is not positive.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.gpu.attention_prefill import sequence_of

SMALL = 16  # rows of a block


@triton.jit
def logs_of(decay, of_heads, inside, c, KEYS: tl.constexpr, DECAYS: tl.constexpr):
    """Of rows `of_heads`, [rows, channels]; 0 where they are not inside. DECAYS: of a row's head, KEYS or 1."""
    there = inside[:, None] & (c < KEYS)[None, :]
    return tl.load(decay + of_heads[:, None] * DECAYS + c[None, :] % DECAYS, there, other=0.0)


@triton.jit
def faded_to_end(keys, decay, of_heads, inside, c, HEADS: tl.constexpr, KEYS: tl.constexpr, DECAYS: tl.constexpr):
    """keys [rows, channels], faded by the rows behind; inside: those that are not the last. A sum that had a row's own
    logarithm, less that one, would be wrong where that is large."""
    behind = logs_of(decay, of_heads + HEADS, inside, c, KEYS, DECAYS)
    return keys * tl.exp(tl.cumsum(behind, 0, reverse=True))


@triton.jit
def _put(alike, seen, found, of_heads, column, inside, asks, CHUNK: tl.constexpr):
    at, there = of_heads[:, None] * CHUNK + column[None, :], inside[:, None] & (column >= 0)[None, :]
    tl.store(alike + at, found, there & (asks == 0)[:, None])
    tl.store(seen + at, found, there & (asks == 1)[:, None])


@triton.jit(do_not_specialize=["first", "sequences"])
def faded_pairs(asked, written, decay, beta, alike, seen, starts, first, sequences, HEADS: tl.constexpr,
                GROUP: tl.constexpr, KEYS: tl.constexpr, DECAYS: tl.constexpr, KB: tl.constexpr, CHUNK: tl.constexpr,
                SMALL: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """alike: written to written, times the row's beta; seen: asked to written. Both float32 [T, HEADS, CHUNK]: a row's
    columns are its chunk's rows. Blocks behind a row's own are left as they are."""
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    s += first
    if s >= sequences:
        return
    head, small, GROUPS = tl.program_id(1), tl.program_id(2), HEADS // GROUP
    own, end = tl.load(starts + s) + block * CHUNK + small * SMALL, tl.load(starts + s + 1)
    if own >= end:
        return
    r, i, c = tl.arange(0, 2 * SMALL), tl.arange(0, SMALL), tl.arange(0, KB)
    t, asks = r % SMALL, r // SMALL
    inside, rows = own + t < end, (own + t).to(tl.int64)
    of_heads, there = rows * HEADS + head, inside[:, None] & (c < KEYS)[None, :]
    at = (rows[:, None] * GROUPS + head // GROUP) * KEYS + c[None, :]
    faded = tl.load(written + at, there & (asks == 0)[:, None], other=0.0)
    faded *= tl.load(beta + of_heads, inside, other=0.0)[:, None]
    faded += tl.load(asked + at, there & (asks == 1)[:, None], other=0.0)  # one of the two is 0
    found = tl.zeros([2 * SMALL, SMALL], tl.float32)
    for back in tl.static_range(SMALL):
        near = SMALL - 1 - back
        row, real = (own + near).to(tl.int64), c < tl.where(own + near < end, KEYS, 0)
        key = tl.load(written + (row * GROUPS + head // GROUP) * KEYS + c, real, other=0.0)
        log = tl.load(decay + (row * HEADS + head) * DECAYS + c % DECAYS, real, other=0.0)
        sees = (i == near)[None, :] & (t + asks > near)[:, None]
        found = tl.where(sees, tl.sum(faded * key[None, :], 1)[:, None], found)
        faded *= tl.where((t >= near)[:, None], tl.exp(log)[None, :], 1.0)
    _put(alike, seen, found, of_heads, small * SMALL + i, inside, asks, CHUNK)
    for back in range(small):
        before = (own - (back + 1) * SMALL + i).to(tl.int64)
        far, of_groups = before * HEADS + head, (before * GROUPS + head // GROUP) * KEYS
        keys = tl.load(written + of_groups[:, None] + c[None, :], (c < KEYS)[None, :], other=0.0)
        keys = faded_to_end(keys, decay, far, i < SMALL - 1, c, HEADS, KEYS, DECAYS)
        product = tl.dot(faded, tl.trans(keys), input_precision=PRECISION)
        _put(alike, seen, product, of_heads, (small - 1 - back) * SMALL + i, inside, asks, CHUNK)
        faded *= tl.exp(tl.sum(logs_of(decay, far, i < SMALL, c, KEYS, DECAYS), 0))[None, :]
