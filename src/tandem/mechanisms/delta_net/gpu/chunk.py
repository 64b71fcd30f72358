"""Products among the rows of a chunk: the gated delta rule in chunks (arXiv 2412.06464, §3.3).

With G the running sum of the decays' logarithms in a chunk, row t learns

    u_t = beta_t (v_t - e^G_t S k_t - sum over i < t of e^(G_t - G_i) (k_t . k_i) u_i),

where S is the memory before the chunk. So u = (I + A)^-1 beta (v - e^G S k), with A below its diagonal. The inverse
does not depend on S: it is made here, for all chunks at once, and so are q . k with their decays. What is left is done
chunk after chunk (`walk.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.gpu.attention_prefill import sequence_of
from tandem.mechanisms.delta_net.gpu.parts import gates_of
from tandem.mechanisms.delta_net.shape import DELTA_CHUNK

CHUNK, SMALL = DELTA_CHUNK, 16  # rows of a chunk; of a block that is inverted row by row


@triton.jit
def _small_inverses(blocks, N: tl.constexpr, SMALL: tl.constexpr):
    """(I + B)^-1 of every strictly lower B of blocks [N, SMALL, SMALL], by substitution, which does not cancel."""
    i = tl.arange(0, SMALL)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + blocks * 0.0
    for row in range(1, SMALL):
        chosen = (i == row)[None, :, None]
        of_row = tl.sum(tl.where(chosen, blocks, 0.0), 1)
        inverse -= tl.where(chosen, tl.sum(of_row[:, :, None] * inverse, 1)[:, None, :], 0.0)
    return inverse


@triton.jit
def inverse(a, CHUNK: tl.constexpr, SMALL: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [CHUNK, CHUNK], CHUNK = 4 SMALL, float32.

    With D of the blocks on the diagonal and R of the rest, I + a = (I + D)(I + X), X = (I + D)^-1 R, and X^4 = 0.
    """
    N: tl.constexpr = CHUNK // SMALL
    r, block = tl.arange(0, CHUNK), tl.arange(0, N)
    near = (r[:, None] // SMALL) == (r[None, :] // SMALL)
    diagonal = tl.sum(tl.reshape(tl.where(near, a, 0.0), [N, SMALL, N, SMALL]), 2)
    small = _small_inverses(diagonal, N, SMALL)[:, :, None, :]
    same_block = (block[:, None] == block[None, :])[:, None, :, None]
    first = tl.reshape(tl.where(same_block, small, 0.0), [CHUNK, CHUNK])
    x = tl.dot(first, tl.where(near, 0.0, a), input_precision=PRECISION)
    square = tl.dot(x, x, input_precision=PRECISION)
    series = tl.where(r[:, None] == r[None, :], 1.0, 0.0) - x + square
    series -= tl.dot(x, square, input_precision=PRECISION)
    return tl.dot(series, first, input_precision=PRECISION)


@triton.jit(do_not_specialize=["first", "sequences"])
def within(qk, gates, decay, dt_bias, starts, solved, query_scores, logs, betas, first, sequences, CHUNK: tl.constexpr,
           SMALL: tl.constexpr, AT_ONCE: tl.constexpr, V_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
           GROUP: tl.constexpr, K_DIM: tl.constexpr, GATES: tl.constexpr, B_FIRST: tl.constexpr,
           B_STEP: tl.constexpr, A_FIRST: tl.constexpr, A_STEP: tl.constexpr, KB: tl.constexpr,
           PRECISION: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """solved: (I + A)^-1; query_scores: q . k with decays; both [T, V_HEADS, CHUNK]: a row's columns are its chunk's
    rows. logs: G, betas: float32 [T, V_HEADS]."""
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    s += first
    if s >= sequences:
        return
    head = tl.program_id(1)
    start = tl.load(starts + s) + block * CHUNK
    r, d = tl.arange(0, CHUNK), tl.arange(0, KB)
    inside = start + r < tl.load(starts + s + 1)
    rows = (start + r).to(tl.int64)
    beta, log = gates_of(gates, tl.load(decay + head), tl.load(dt_bias + head), rows, head, inside, GROUP, GATES,
                         B_FIRST, B_STEP, A_FIRST, A_STEP)  # fmt: skip
    beta, log = tl.where(inside, beta, 0.0), tl.cumsum(tl.where(inside, log, 0.0), 0)
    tl.store(betas + rows * V_HEADS + head, beta, inside)
    tl.store(logs + rows * V_HEADS + head, log, inside)
    at = qk + (rows[:, None] * 2 * K_HEADS + head // GROUP) * K_DIM + d[None, :]
    mask = inside[:, None] & (d < K_DIM)[None, :]
    q, k = tl.load(at, mask, other=0.0), tl.load(at + K_HEADS * K_DIM, mask, other=0.0)
    lower = r[:, None] >= r[None, :]
    fade = tl.where(lower, tl.exp(tl.where(lower, log[:, None] - log[None, :], 0.0)), 0.0)
    strict = tl.where(r[:, None] > r[None, :], beta[:, None] * fade, 0.0)
    a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * strict
    kind: tl.constexpr = solved.dtype.element_ty
    to = (rows[:, None] * V_HEADS + head) * CHUNK + r[None, :]
    tl.store(solved + to, inverse(a, CHUNK, SMALL, EXACT).to(kind), inside[:, None])
    pairs = tl.dot(q, tl.trans(k), input_precision=PRECISION) * fade
    tl.store(query_scores + to, pairs.to(kind), inside[:, None])
