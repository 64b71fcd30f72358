"""The convolution of prompts' chunks, and what is kept of their last inputs.

Blocks of rows begin where their sequence's chunk begins. Inputs of tokens before come from the sequence's ring; which
place of it a token has, its position says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.gpu.attention_prefill import sequence_of
from tandem.mechanisms.delta_net.gpu.parts import activated


@triton.jit
def _columns(h, K_HEADS: tl.constexpr, GROUP: tl.constexpr, V_DIM: tl.constexpr, Q_FIRST: tl.constexpr,
             Q_STEP: tl.constexpr, K_FIRST: tl.constexpr, K_STEP: tl.constexpr, V_FIRST: tl.constexpr,
             V_STEP: tl.constexpr):  # fmt: skip
    """First column of run `h` of channels: heads of q, then of k, then of v."""
    v_head = h - 2 * K_HEADS
    of_v = V_FIRST + v_head // GROUP * V_STEP + v_head % GROUP * V_DIM
    of_k = K_FIRST + (h - K_HEADS) * K_STEP
    return tl.where(h < K_HEADS, Q_FIRST + h * Q_STEP, tl.where(h < 2 * K_HEADS, of_k, of_v))


@triton.jit
def _summed(rows, ring, conv, channel, t, n, d, inside, known, CHANNELS: tl.constexpr, PROJECTED: tl.constexpr,
            CONV: tl.constexpr, PLACES: tl.constexpr):  # fmt: skip
    """The convolution of channels channel + d in rows t < n of a chunk, float32 [rows, channels]."""
    summed = (t[:, None] * d[None, :]).to(tl.float32) * 0.0
    for back in tl.static_range(0, CONV):
        source = t - back
        mask = ((source >= 0) & (t < n))[:, None] & inside[None, :]
        new = tl.load(rows + source[:, None].to(tl.int64) * PROJECTED + d[None, :], mask, other=0.0)
        before = ((source < 0) & (known + source >= 0))[:, None] & inside[None, :]
        place = (known + source + PLACES) % PLACES
        old = tl.load(ring + place[:, None] * CHANNELS + channel + d[None, :], before, other=0.0)
        weight = tl.load(conv + (CONV - 1 - back) * CHANNELS + channel + d, inside, other=0.0)
        summed += (new + old).to(tl.float32) * weight[None, :]  # one of the two is 0
    return summed


@triton.jit(do_not_specialize=["first", "sequences"])
def convolve(projected, conv, starts, lens, slots, inputs, qk, v, first, sequences, inputs_stride, scale, unit_eps,
             ROWS: tl.constexpr, AT_ONCE: tl.constexpr, CHANNELS: tl.constexpr, PROJECTED: tl.constexpr,
             K_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, CONV: tl.constexpr,
             Q_FIRST: tl.constexpr, Q_STEP: tl.constexpr, K_FIRST: tl.constexpr, K_STEP: tl.constexpr,
             V_FIRST: tl.constexpr, V_STEP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
             PLACES: tl.constexpr):  # fmt: skip
    """qk [T, 2 K_HEADS, K_DIM] of unit length, q times `scale`; v [T, V_HEADS, V_DIM]."""
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), ROWS, AT_ONCE)
    s += first
    if s >= sequences:
        return
    h = tl.program_id(1)
    start = tl.load(starts + s)
    n = tl.load(starts + s + 1) - start
    known = tl.load(lens + s) - n
    t = block * ROWS + tl.arange(0, ROWS)
    column = _columns(h, K_HEADS, GROUP, V_DIM, Q_FIRST, Q_STEP, K_FIRST, K_STEP, V_FIRST, V_STEP)
    rows = projected + start.to(tl.int64) * PROJECTED + column
    ring = inputs + tl.load(slots + s).to(tl.int64) * inputs_stride
    kind: tl.constexpr = qk.dtype.element_ty
    to = (start + t).to(tl.int64)[:, None]
    if h < 2 * K_HEADS:
        d = tl.arange(0, KB)
        y = activated(_summed(rows, ring, conv, h * K_DIM, t, n, d, d < K_DIM, known, CHANNELS, PROJECTED, CONV,
                              PLACES), kind)  # fmt: skip
        unit = tl.rsqrt(tl.sum(y * y, 1) + unit_eps) * tl.where(h < K_HEADS, scale, 1.0)
        in_k = (t < n)[:, None] & (d < K_DIM)[None, :]
        tl.store(qk + (to * 2 * K_HEADS + h) * K_DIM + d[None, :], (y * unit[:, None]).to(kind), in_k)
    else:
        j, head = tl.arange(0, VB), h - 2 * K_HEADS
        channel = 2 * K_HEADS * K_DIM + head * V_DIM
        w = activated(_summed(rows, ring, conv, channel, t, n, j, j < V_DIM, known, CHANNELS, PROJECTED, CONV,
                              PLACES), kind)  # fmt: skip
        in_v = (t < n)[:, None] & (j < V_DIM)[None, :]
        tl.store(v + (to * K_HEADS * GROUP + head) * V_DIM + j[None, :], w.to(kind), in_v)


@triton.jit(do_not_specialize=["first"])
def keep(projected, starts, lens, slots, inputs, first, inputs_stride, CHANNELS: tl.constexpr,
         PROJECTED: tl.constexpr, K_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr,
         V_DIM: tl.constexpr, CONV: tl.constexpr, Q_FIRST: tl.constexpr, Q_STEP: tl.constexpr, K_FIRST: tl.constexpr,
         K_STEP: tl.constexpr, V_FIRST: tl.constexpr, V_STEP: tl.constexpr, KB: tl.constexpr,
         VB: tl.constexpr, PLACES: tl.constexpr):  # fmt: skip
    """The chunk's last inputs into the ring. After `convolve`, which reads what was there."""
    s, h = tl.program_id(0) + first, tl.program_id(1)
    slot = tl.load(slots + s).to(tl.int64)
    if slot == 0:
        return
    start = tl.load(starts + s)
    n = tl.load(starts + s + 1) - start
    known = tl.load(lens + s) - n
    column = _columns(h, K_HEADS, GROUP, V_DIM, Q_FIRST, Q_STEP, K_FIRST, K_STEP, V_FIRST, V_STEP)
    of_v = h >= 2 * K_HEADS
    channel = tl.where(of_v, 2 * K_HEADS * K_DIM + (h - 2 * K_HEADS) * V_DIM, h * K_DIM)
    d = tl.arange(0, max(KB, VB))
    inside = d < tl.where(of_v, V_DIM, K_DIM)
    for back in tl.static_range(1, CONV):
        if n >= back:
            new = tl.load(projected + (start + n - back).to(tl.int64) * PROJECTED + column + d, inside)
            place = (known + n - back) % PLACES
            tl.store(inputs + slot * inputs_stride + place * CHANNELS + channel + d, new, inside)
