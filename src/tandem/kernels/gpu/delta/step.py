"""One token of each sequence: convolution, gates, recurrence and gated norm in one kernel.

A program has one value head of one sequence, whose memory it holds in registers. It asks for that before the kernel
that makes the projections has ended: nobody else writes it in a step.

Programs of value heads that share a key head read the same last inputs while one of them keeps the new one. So inputs
lie in a ring of at least as many places as the convolution is wide: the place of a token's own input is one that nobody
reads.

Rows of slot 0 fill up a graph. They are copies of the last real row, which writes its result for them, too: what they
then write into the cache is the same. They fold nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.config.layers import DeltaRule
from tandem.kernels.batch_layout import BatchLayout
from tandem.kernels.delta import UNIT_EPS, DeltaState, DeltaWeights
from tandem.kernels.gpu.delta.parts import activated, add_three, add_two, constants, gates_of, normed
from tandem.kernels.gpu.overlap import let_next_start, overlapped, wait_for_last

ELEMENTS_PER_WARP = 1 << 11
MAX_REGISTERS = 128  # of a thread: then two programs of eight warps share a multiprocessor


@triton.jit
def _past(ring, conv, channel, d, inside, known, CHANNELS: tl.constexpr, CONV: tl.constexpr, PLACES: tl.constexpr,
          TAPS: tl.constexpr):  # fmt: skip
    """What the inputs before add to the convolution of channels channel + d, and the weights of the new one.

    All of them are one tile, a number a thread. Rows one by one would be asked for in the memory's layout, in which
    every thread needs several channels and a warp's threads need the same ones.
    """
    back, at = tl.arange(0, TAPS)[:, None], (channel + d)[None, :]
    weight = tl.load(conv + (CONV - 1 - back) * CHANNELS + at, (back < CONV) & inside[None, :], other=0.0)
    there = (back > 0) & (back < CONV) & (back <= known) & inside[None, :]
    old = tl.load(ring + (known + PLACES - back) % PLACES * CHANNELS + at, there, other=0.0)
    return tl.reduce((old.to(tl.float32) * weight, tl.where(back == 0, weight, 0.0)), 0, add_two)


@triton.jit(do_not_specialize=["rows"])
def _step(projected, gates, conv, decay, dt_bias, norm, lens, slots, inputs, memory, out, rows, inputs_stride,
          memory_stride, scale, unit_eps, eps, V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, GROUP: tl.constexpr,
          K_DIM: tl.constexpr, V_DIM: tl.constexpr, CONV: tl.constexpr, CHANNELS: tl.constexpr,
          PROJECTED: tl.constexpr, GATES: tl.constexpr, Q_FIRST: tl.constexpr, Q_STEP: tl.constexpr,
          K_FIRST: tl.constexpr, K_STEP: tl.constexpr, V_FIRST: tl.constexpr, V_STEP: tl.constexpr,
          Z_FIRST: tl.constexpr, Z_STEP: tl.constexpr, B_FIRST: tl.constexpr, B_STEP: tl.constexpr,
          A_FIRST: tl.constexpr, A_STEP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
          TAPS: tl.constexpr, PLACES: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    let_next_start(OVERLAP)
    s, head = tl.program_id(0), tl.program_id(1)
    slot, known = tl.load(slots + s).to(tl.int64), tl.load(lens + s) - 1
    i, j = tl.arange(0, KB), tl.arange(0, VB)
    in_k, in_v = i < K_DIM, j < V_DIM
    inner = in_k[:, None] & in_v[None, :]
    held = memory + slot * memory_stride + head * K_DIM * V_DIM + i[:, None] * V_DIM + j[None, :]
    state = tl.load(held, inner & (known > 0) & (slot > 0), other=0.0)
    ring = inputs + slot * inputs_stride
    key_head, own = head // GROUP, head % GROUP
    q_channel, k_channel = key_head * K_DIM, (K_HEADS + key_head) * K_DIM
    v_channel = 2 * K_HEADS * K_DIM + head * V_DIM
    q_past, q_weight = _past(ring, conv, q_channel, i, in_k, known, CHANNELS, CONV, PLACES, TAPS)
    k_past, k_weight = _past(ring, conv, k_channel, i, in_k, known, CHANNELS, CONV, PLACES, TAPS)
    v_past, v_weight = _past(ring, conv, v_channel, j, in_v, known, CHANNELS, CONV, PLACES, TAPS)
    weight = tl.load(norm + j, in_v, other=0.0).to(tl.float32)
    to = out + (s.to(tl.int64) * V_HEADS + head) * V_DIM + j
    own_decay, own_bias = tl.load(decay + head), tl.load(dt_bias + head)
    following = tl.load(slots + s + 1, s + 1 < rows, other=1)
    wait_for_last(OVERLAP)
    kind: tl.constexpr = out.dtype.element_ty
    if slot == 0:
        if tl.load(slots) == 0:  # there is no real row at all
            tl.store(to, tl.zeros_like(weight).to(kind), in_v)
        return
    row = projected + s.to(tl.int64) * PROJECTED
    new_q = tl.load(row + Q_FIRST + key_head * Q_STEP + i, in_k, other=0.0)
    new_k = tl.load(row + K_FIRST + key_head * K_STEP + i, in_k, other=0.0)
    new_v = tl.load(row + V_FIRST + key_head * V_STEP + own * V_DIM + j, in_v, other=0.0)
    z = tl.load(row + Z_FIRST + key_head * Z_STEP + own * V_DIM + j, in_v, other=0.0).to(tl.float32)
    beta, log = gates_of(gates, own_decay, own_bias, s.to(tl.int64), head, True, GROUP, GATES, B_FIRST, B_STEP,
                         A_FIRST, A_STEP)  # fmt: skip
    q = activated(q_past + new_q.to(tl.float32) * q_weight, kind)
    k = activated(k_past + new_k.to(tl.float32) * k_weight, kind)
    v = activated(v_past + new_v.to(tl.float32) * v_weight, kind)
    # All sums are of the memory as it was, and of q and k before they are of unit length: two waits instead of six.
    q_square, k_square, both = tl.reduce((q * q, k * k, q * k), 0, add_three)
    of_k, of_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, add_two)
    shrink = tl.exp(log)
    q_unit, k_unit = tl.rsqrt(q_square + unit_eps) * scale, tl.rsqrt(k_square + unit_eps)
    learnt = beta * (v - shrink * k_unit * of_k)
    y = (q_unit * (shrink * of_q + k_unit * both * learnt)).to(kind).to(tl.float32)
    result = normed(y, tl.sum(y * y) / V_DIM, weight, z, eps, kind)
    tl.store(to, result, in_v)
    tl.store(held, shrink * state + (k * k_unit)[:, None] * learnt[None, :], inner)
    kept = ring + known % PLACES * CHANNELS
    tl.store(kept + q_channel + i, new_q, in_k & (own == 0))
    tl.store(kept + k_channel + i, new_k, in_k & (own == 0))
    tl.store(kept + v_channel + j, new_v, in_v)
    if following == 0:
        for copy in range(s + 1, rows):
            tl.store(to + (copy - s) * V_HEADS * V_DIM, result, in_v)


def step(
    shape: DeltaRule, weights: DeltaWeights, rows: tuple[Tensor, Tensor], batch: BatchLayout, count: int,
    state: DeltaState, out: Tensor,
) -> None:  # fmt: skip
    """The first `count` sequences, which have one row each. rows: projections and gates."""
    inputs, _, memory = state
    named = constants(shape)
    warps = max(1, min(16, shape.padded_head // ELEMENTS_PER_WARP))
    _step[(count, shape.v_heads)](
        *rows, *weights, batch.seq_lens, batch.slots, inputs, memory, out, count, inputs.stride(0), memory.stride(0),
        shape.k_dim**-0.5, UNIT_EPS, shape.norm.eps, V_HEADS=shape.v_heads, CHANNELS=shape.channels,
        PROJECTED=rows[0].shape[1], GATES=rows[1].shape[1], **named,
        TAPS=triton.next_power_of_2(shape.conv), PLACES=inputs.shape[1],
        num_warps=warps, maxnreg=MAX_REGISTERS, **overlapped(out.device),
    )  # fmt: skip
