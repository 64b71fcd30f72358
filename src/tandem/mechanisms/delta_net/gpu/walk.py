"""From chunk to chunk: what each reads of the memory, learns and leaves in it; and the norm of what was read.

A program has some columns of one head's memory, of which rows of keys and values are independent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.mechanisms.delta_net.gpu.parts import normed


@triton.jit(do_not_specialize=["first"])
def walk(qk, v, solved, query_scores, logs, betas, starts, lens, slots, memory, read, first, memory_stride,
         CHUNK: tl.constexpr, COLUMNS: tl.constexpr, V_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
         GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, KB: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """Arrays as `within` makes them; read [T, V_HEADS, V_DIM]: what each row's query finds."""
    head, s = tl.program_id(1), tl.program_id(2) + first
    slot = tl.load(slots + s).to(tl.int64)
    start, end = tl.load(starts + s), tl.load(starts + s + 1)
    known = tl.load(lens + s) - (end - start)
    r, i = tl.arange(0, CHUNK), tl.arange(0, KB)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = (i < K_DIM)[:, None] & (j < V_DIM)[None, :]
    memory_at = memory + slot * memory_stride + head * K_DIM * V_DIM + i[:, None] * V_DIM + j[None, :]
    state = tl.load(memory_at, inner & (known > 0) & (slot > 0), other=0.0)
    for chunk in range(start, end, CHUNK):
        inside, rows = chunk + r < end, (chunk + r).to(tl.int64)
        in_k, in_v = inside[:, None] & (i < K_DIM)[None, :], inside[:, None] & (j < V_DIM)[None, :]
        at = qk + (rows[:, None] * 2 * K_HEADS + head // GROUP) * K_DIM + i[None, :]
        q, k = tl.load(at, in_k, other=0.0), tl.load(at + K_HEADS * K_DIM, in_k, other=0.0)
        of_rows = rows * V_HEADS + head
        values = tl.load(v + of_rows[:, None] * V_DIM + j[None, :], in_v, other=0.0).to(tl.float32)
        pairs = of_rows[:, None] * CHUNK + r[None, :]
        solve = tl.load(solved + pairs, inside[:, None], other=0.0)
        scores = tl.load(query_scores + pairs, inside[:, None], other=0.0)
        log = tl.load(logs + of_rows, inside, other=0.0)
        beta = tl.load(betas + of_rows, inside, other=0.0)
        kind: tl.constexpr = read.dtype.element_ty
        before, fade = state.to(kind), tl.exp(log)[:, None]
        rest = beta[:, None] * (values - fade * tl.dot(k, before, input_precision=PRECISION))
        learnt = tl.dot(solve, rest.to(kind), input_precision=PRECISION)
        y = fade * tl.dot(q, before, input_precision=PRECISION)
        y += tl.dot(scores, learnt.to(kind), input_precision=PRECISION)
        tl.store(read + of_rows[:, None] * V_DIM + j[None, :], y.to(kind), in_v)
        last = tl.min(log)  # logarithms of decays are not positive: the sum over all rows
        left = (tl.exp(last - log)[:, None] * learnt).to(kind)
        state = tl.exp(last) * state + tl.dot(tl.trans(k), left, input_precision=PRECISION)
    tl.store(memory_at, state, inner & (slot > 0))


@triton.jit(do_not_specialize=["first", "rows"])
def gated_norm(read, projected, norm, out, first, rows, eps, PROJECTED: tl.constexpr, V_HEADS: tl.constexpr,
               GROUP: tl.constexpr, V_DIM: tl.constexpr, Z_FIRST: tl.constexpr, Z_STEP: tl.constexpr,
               VB: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Rows from `first` on."""
    t = (first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head, j = tl.program_id(1), tl.arange(0, VB)
    inside = (t < rows) & (j < V_DIM)[None, :]
    at = (t * V_HEADS + head) * V_DIM + j[None, :]
    y = tl.load(read + at, inside, other=0.0).to(tl.float32)
    column = Z_FIRST + head // GROUP * Z_STEP + head % GROUP * V_DIM
    z = tl.load(projected + t * PROJECTED + column + j[None, :], inside, other=0.0).to(tl.float32)
    weight = tl.load(norm + j, j < V_DIM, other=0.0).to(tl.float32)[None, :]
    mean = tl.sum(y * y, 1)[:, None] / V_DIM
    tl.store(out + at, normed(y, mean, weight, z, eps, SIGMOID, out.dtype.element_ty), inside)
