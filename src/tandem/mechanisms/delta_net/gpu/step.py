"""One token of each sequence: convolution, gates, recurrence and gated norm in one kernel.

A program has one value head of one sequence, whose memory it holds in registers. It asks for that before the kernel
that makes the projections has ended: nobody else writes it in a step. So it does for its two rows of the matrix that
makes gates: a kernel for that small product would take longer than the product.

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

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.dependent_launch import let_next_start, overlapped, wait_for_last
from tandem.kernels.gpu.linear import GpuLinear
from tandem.mechanisms.delta_net.gpu import rows as rows_in_cuda
from tandem.mechanisms.delta_net.gpu.parts import (
    activated,
    add_three,
    add_two,
    constants,
    gates_of,
    keep_inputs,
    normed,
    softplus,
)
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import UNIT_EPS, DeltaState, DeltaWeights, Gates, Product

ELEMENTS_PER_WARP = 1 << 11
MOST_HIDDEN = 4096  # numbers of a row that registers hold beside a head's memory
MAX_REGISTERS = 128  # of a thread: then two programs of eight warps share a multiprocessor


@triton.jit
def _past(ring, conv, channel, d, inside, known, CHANNELS: tl.constexpr, CONV: tl.constexpr, PLACES: tl.constexpr,
          TAPS: tl.constexpr):  # fmt: skip
    """Contribution of earlier inputs to the convolution of channels channel + d, and the weights of the new one.

    All of them are one tile, a number a thread. Rows one by one would be asked for in the memory's layout, in which
    every thread needs several channels and a warp's threads need the same ones.
    """
    back, at = tl.arange(0, TAPS)[:, None], (channel + d)[None, :]
    weight = tl.load(conv + (CONV - 1 - back) * CHANNELS + at, (back < CONV) & inside[None, :], other=0.0)
    mask = (back > 0) & (back < CONV) & (back <= known) & inside[None, :]
    old = tl.load(ring + (known + PLACES - back) % PLACES * CHANNELS + at, mask, other=0.0)
    return tl.reduce((old.to(tl.float32) * weight, tl.where(back == 0, weight, 0.0)), 0, add_two)


@triton.jit
def _own_gates(x, of_b, of_a, h, inside, decay, dt_bias, kind: tl.constexpr):
    """As `gates_of`, of a row and the two rows of the matrix."""
    row = tl.load(x + h, inside, other=0.0).to(tl.float32)
    b, a = tl.reduce((row * of_b.to(tl.float32), row * of_a.to(tl.float32)), 0, add_two)
    b, a = b.to(kind).to(tl.float32), a.to(kind).to(tl.float32)
    return tl.sigmoid(b), decay * softplus(a + dt_bias)


@triton.jit
def _gate_rows(gates, b, a, HIDDEN: tl.constexpr, HB: tl.constexpr):
    h = tl.arange(0, HB)
    of_b = tl.load(gates + b * HIDDEN + h, h < HIDDEN, other=0.0)
    return h, of_b, tl.load(gates + a * HIDDEN + h, h < HIDDEN, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _step(projected, gates, x, conv, decay, dt_bias, norm, lens, slots, inputs, memory, out, rows, inputs_stride,
          memory_stride, scale, unit_eps, eps, SIGMOID: tl.constexpr, V_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
          GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, CONV: tl.constexpr, CHANNELS: tl.constexpr,
          PROJECTED: tl.constexpr, GATES: tl.constexpr, Q_FIRST: tl.constexpr, Q_STEP: tl.constexpr,
          K_FIRST: tl.constexpr, K_STEP: tl.constexpr, V_FIRST: tl.constexpr, V_STEP: tl.constexpr,
          Z_FIRST: tl.constexpr, Z_STEP: tl.constexpr, B_FIRST: tl.constexpr, B_STEP: tl.constexpr,
          A_FIRST: tl.constexpr, A_STEP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, TAPS: tl.constexpr,
          PLACES: tl.constexpr, HIDDEN: tl.constexpr, HB: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    let_next_start(OVERLAP)
    s, t, head = tl.program_id(0), tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, known = tl.load(slots + s).to(tl.int64), tl.load(lens + s) - 1
    i, j = tl.arange(0, KB), tl.arange(0, VB)
    in_k, in_v = i < K_DIM, j < V_DIM
    inner = in_k[:, None] & in_v[None, :]
    memory_at = memory + slot * memory_stride + head * K_DIM * V_DIM + i[:, None] * V_DIM + j[None, :]
    state = tl.load(memory_at, inner & (known > 0) & (slot > 0), other=0.0)
    ring, key_head, own = inputs + slot * inputs_stride, head // GROUP, head % GROUP
    q_past, q_weight = _past(ring, conv, key_head * K_DIM, i, in_k, known, CHANNELS, CONV, PLACES, TAPS)
    k_past, k_weight = _past(ring, conv, (K_HEADS + key_head) * K_DIM, i, in_k, known, CHANNELS, CONV, PLACES, TAPS)
    v_channel = 2 * K_HEADS * K_DIM + head * V_DIM
    v_past, v_weight = _past(ring, conv, v_channel, j, in_v, known, CHANNELS, CONV, PLACES, TAPS)
    weight = tl.load(norm + j, in_v, other=0.0).to(tl.float32)
    to = out + (t * V_HEADS + head) * V_DIM + j
    own_decay, own_bias = tl.load(decay + head), tl.load(dt_bias + head)
    following = tl.load(slots + s + 1, s + 1 < rows, other=1)
    if HIDDEN:
        b, a = B_FIRST + key_head * B_STEP + own, A_FIRST + key_head * A_STEP + own
        h, of_b, of_a = _gate_rows(gates, b, a, HIDDEN, HB)
    wait_for_last(OVERLAP)
    kind: tl.constexpr = out.dtype.element_ty
    if slot == 0:
        if tl.load(slots) == 0:  # there is no real row at all
            tl.store(to, tl.zeros_like(weight).to(kind), in_v)
        return
    row = projected + t * PROJECTED
    new_q = tl.load(row + Q_FIRST + key_head * Q_STEP + i, in_k, other=0.0)
    new_k = tl.load(row + K_FIRST + key_head * K_STEP + i, in_k, other=0.0)
    new_v = tl.load(row + V_FIRST + key_head * V_STEP + own * V_DIM + j, in_v, other=0.0)
    z = tl.load(row + Z_FIRST + key_head * Z_STEP + own * V_DIM + j, in_v, other=0.0).to(tl.float32)
    if HIDDEN:
        beta, log = _own_gates(x + t * HIDDEN, of_b, of_a, h, h < HIDDEN, own_decay, own_bias, kind)
    else:
        beta, log = gates_of(gates, own_decay, own_bias, t, head, True, GROUP, GATES, B_FIRST, B_STEP, A_FIRST, A_STEP)
    q = activated(q_past + new_q.to(tl.float32) * q_weight, kind)
    k = activated(k_past + new_k.to(tl.float32) * k_weight, kind)
    v = activated(v_past + new_v.to(tl.float32) * v_weight, kind)
    # All sums are of the memory as it was, and of q and k before they are of unit length: two waits instead of six.
    q_square, k_square, both = tl.reduce((q * q, k * k, q * k), 0, add_three)
    of_k, of_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, add_two)
    shrink, q_unit, k_unit = tl.exp(log), tl.rsqrt(q_square + unit_eps) * scale, tl.rsqrt(k_square + unit_eps)
    learnt = beta * (v - shrink * k_unit * of_k)
    y = (q_unit * (shrink * of_q + k_unit * both * learnt)).to(kind).to(tl.float32)
    result = normed(y, tl.sum(y * y) / V_DIM, weight, z, eps, SIGMOID, kind)
    tl.store(to, result, in_v)
    tl.store(memory_at, shrink * state + (k * k_unit)[:, None] * learnt[None, :], inner)
    place = ring + known % PLACES * CHANNELS
    keep_inputs(place, new_q, new_k, new_v, i, j, in_k, in_v, key_head, head, own, K_HEADS, K_DIM, V_DIM)
    if following == 0:
        for copy in range(s + 1, rows):
            tl.store(to + (copy - s) * V_HEADS * V_DIM, result, in_v)


def multiplies(gates: Gates) -> bool:
    """Whether `step` makes such gates by itself."""
    if not isinstance(gates, Product) or not isinstance(gates.matrix, GpuLinear):
        return False
    return gates.matrix.bias is None and gates.matrix.in_features <= MOST_HIDDEN


def step(
    shape: DeltaRule, weights: DeltaWeights, rows: tuple[Tensor, Gates], batch: KernelBatch, count: int,
    state: DeltaState, out: Tensor,
) -> None:  # fmt: skip
    """The first `count` sequences, which have one row each. rows: projections and gates, products where it
    `multiplies`: then the kernel is given the matrix and x of HIDDEN numbers."""
    (projected, gates), (inputs, _, memory) = rows, state
    own, x, hidden = _made_from(gates)
    if rows_in_cuda.takes(shape, weights, (projected, own, x), state, hidden):
        rows_in_cuda.step(shape, weights, (projected, own, x, hidden), batch, count, state, out)
        return
    warps = max(1, min(16, shape.padded_head // ELEMENTS_PER_WARP))
    _step[(count, shape.v_heads)](
        projected, own, x, *weights, batch.seq_lens, batch.slots, inputs, memory, out, count, inputs.stride(0),
        memory.stride(0), shape.k_dim**-0.5, UNIT_EPS, shape.norm.eps, V_HEADS=shape.v_heads, CHANNELS=shape.channels,
        PROJECTED=projected.shape[1], GATES=2 * shape.v_heads, **constants(shape),
        TAPS=triton.next_power_of_2(shape.conv), PLACES=inputs.shape[1],
        HIDDEN=hidden, HB=triton.next_power_of_2(max(1, hidden)),
        num_warps=warps, maxnreg=MAX_REGISTERS, **overlapped(out.device),
    )  # fmt: skip


def _made_from(gates: Gates) -> tuple[Tensor, Tensor, int]:
    """Gates, or the matrix, the rows and their length."""
    if not isinstance(gates, Product):
        return gates, gates, 0
    assert isinstance(gates.matrix, GpuLinear)
    return gates.matrix.weight, gates.x.contiguous(), gates.x.shape[1]
