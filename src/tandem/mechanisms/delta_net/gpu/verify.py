"""Rows of sequences that may draft: as `step.py`, for runs of rows that belong to one sequence.

A run is neighbours of one slot: a token, and the draft tokens behind it. A program has one value head of one run. It
folds the draft tokens accepted since, from the inputs and gates that were kept of them. It folds the run's first row,
too, and stores the memory. The draft tokens go on in registers; of them only inputs and gates are kept.

All tokens pass through one loop, so a token that is folded later is folded with the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.dependent_launch import let_next_start, overlapped, wait_for_last
from tandem.mechanisms.delta_net.gpu.parts import (
    activated,
    add_three,
    add_two,
    constants,
    keep_inputs,
    normed,
    softplus,
)
from tandem.mechanisms.delta_net.gpu.step import ELEMENTS_PER_WARP, MAX_REGISTERS
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import UNIT_EPS, DeltaState, DeltaWeights
from tandem.mechanisms.recurrence.gpu.runs import span


@triton.jit
def _convolved(rows, ring, conv, channel, d, inside, position, known, kind: tl.constexpr,
               CHANNELS: tl.constexpr, PROJECTED: tl.constexpr, CONV: tl.constexpr, PLACES: tl.constexpr,
               TAPS: tl.constexpr):  # fmt: skip
    """Channels channel + d of the token at `position`, after the convolution, float32; and its own inputs. rows: of the
    token at `known`, with those behind it, from the first of these channels on; tokens before are in the ring."""
    back, at = tl.arange(0, TAPS)[:, None], d[None, :]
    weight = tl.load(conv + (CONV - 1 - back) * CHANNELS + channel + at, (back < CONV) & inside[None, :], other=0.0)
    p = position - back
    mask = (back < CONV) & (p >= 0) & inside[None, :]
    old = tl.load(ring + p % PLACES * CHANNELS + channel + at, mask & (p < known), other=0.0)
    new = tl.load(rows + (p - known) * PROJECTED + at, mask & (p >= known), other=0.0)
    x = old.to(tl.float32) + new.to(tl.float32)  # one of the two is 0
    past = tl.where(back > 0, x * weight, 0.0)
    summed, own_weight, own = tl.reduce(
        (past, tl.where(back == 0, weight, 0.0), tl.where(back == 0, x, 0.0)), 0, add_three
    )
    return activated(summed + own * own_weight, kind), own


@triton.jit
def _gate(stash, gate, of, at, place, GATES: tl.constexpr):
    """Column `of` of row `at`; of one before the rows, from its place. float32."""
    old = tl.load(stash + place * GATES + of, at < 0, other=0.0).to(tl.float32)
    return old + tl.load(gate + at * GATES + of, at >= 0, other=0.0).to(tl.float32)  # one of the two is 0


@triton.jit
def _learnt(state, q, k, v, b, a, own_decay, own_bias, scale, unit_eps):
    """The memory after a token, and what the token reads from it. As in `step.py`: sums are of the memory before."""
    beta, shrink = tl.sigmoid(b), tl.exp(own_decay * softplus(a + own_bias))
    q_square, k_square, both = tl.reduce((q * q, k * k, q * k), 0, add_three)
    of_k, of_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, add_two)
    q_unit, k_unit = tl.rsqrt(q_square + unit_eps) * scale, tl.rsqrt(k_square + unit_eps)
    learnt = beta * (v - shrink * k_unit * of_k)
    read = q_unit * (shrink * of_q + k_unit * both * learnt)
    return shrink * state + (k * k_unit)[:, None] * learnt[None, :], read


@triton.jit(do_not_specialize=["first", "rows"])
def _verify(projected, gates, conv, decay, dt_bias, norm, starts, lens, slots, state_lens, inputs, kept_gates, memory,
            out, first, rows, inputs_stride, gates_stride, memory_stride, scale, unit_eps, eps,
            V_HEADS: tl.constexpr, K_HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr,
            V_DIM: tl.constexpr, CONV: tl.constexpr, CHANNELS: tl.constexpr, PROJECTED: tl.constexpr,
            GATES: tl.constexpr, Q_FIRST: tl.constexpr, Q_STEP: tl.constexpr, K_FIRST: tl.constexpr,
            K_STEP: tl.constexpr, V_FIRST: tl.constexpr, V_STEP: tl.constexpr, Z_FIRST: tl.constexpr,
            Z_STEP: tl.constexpr, B_FIRST: tl.constexpr, B_STEP: tl.constexpr, A_FIRST: tl.constexpr,
            A_STEP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr,
            RUN: tl.constexpr, BEFORE: tl.constexpr, SIGMOID: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """BEFORE 1: sequences from `first` on are chunks of prompts; only what came before them is folded."""
    let_next_start(OVERLAP)
    s, head = tl.program_id(0) + first, tl.program_id(1)
    slot, done = tl.load(slots + s).to(tl.int64), tl.load(state_lens + s)
    known, new = span(starts, lens, slots, s, rows, slot, RUN, BEFORE)
    before = tl.load(slots + s - 1, (s > 0) & (slot > 0), other=-1)
    following = tl.load(slots + s + new, s + new < rows, other=1)
    i, j = tl.arange(0, KB), tl.arange(0, VB)
    in_k, in_v = i < K_DIM, j < V_DIM
    inner = in_k[:, None] & in_v[None, :]
    memory_at = memory + slot * memory_stride + head * K_DIM * V_DIM + i[:, None] * V_DIM + j[None, :]
    state = tl.load(memory_at, inner & (done > 0) & (slot > 0), other=0.0)
    weight = tl.load(norm + j, in_v, other=0.0).to(tl.float32)
    own_decay, own_bias = tl.load(decay + head), tl.load(dt_bias + head)
    wait_for_last(OVERLAP)
    kind: tl.constexpr = out.dtype.element_ty
    to = out + (s.to(tl.int64) * V_HEADS + head) * V_DIM + j
    if slot == 0:
        if tl.load(slots) == 0:  # there is no real row at all
            tl.store(to, tl.zeros_like(weight).to(kind), in_v)
        return
    if (before == slot) & (BEFORE == 0):  # within a run
        return
    key_head, own, v_channel = head // GROUP, head % GROUP, 2 * K_HEADS * K_DIM + head * V_DIM
    ring, stash = inputs + slot * inputs_stride, kept_gates + slot * gates_stride
    row, gate = projected + s.to(tl.int64) * PROJECTED, gates + s.to(tl.int64) * GATES
    of_b, of_a = B_FIRST + key_head * B_STEP + own, A_FIRST + key_head * A_STEP + own
    for position in range(done, known + new):
        at, place = position - known, position % PLACES
        q, own_q = _convolved(row + Q_FIRST + key_head * Q_STEP, ring, conv, key_head * K_DIM, i, in_k, position, known,
                              kind, CHANNELS, PROJECTED, CONV, PLACES, TAPS)  # fmt: skip
        k, own_k = _convolved(row + K_FIRST + key_head * K_STEP, ring, conv, (K_HEADS + key_head) * K_DIM, i, in_k,
                              position, known, kind, CHANNELS, PROJECTED, CONV, PLACES, TAPS)  # fmt: skip
        v, own_v = _convolved(row + V_FIRST + key_head * V_STEP + own * V_DIM, ring, conv, v_channel, j, in_v, position,
                              known, kind, CHANNELS, PROJECTED, CONV, PLACES, TAPS)  # fmt: skip
        b, a = _gate(stash, gate, of_b, at, place, GATES), _gate(stash, gate, of_a, at, place, GATES)
        state, read = _learnt(state, q, k, v, b, a, own_decay, own_bias, scale, unit_eps)
        if at == -BEFORE:  # the last one that is sure
            tl.store(memory_at, state, inner)
        if at >= 0:
            y = read.to(kind).to(tl.float32)
            z = tl.load(row + at * PROJECTED + Z_FIRST + key_head * Z_STEP + own * V_DIM + j, in_v, other=0.0)
            result = normed(y, tl.sum(y * y) / V_DIM, weight, z.to(tl.float32), eps, SIGMOID, kind)
            tl.store(to + at * V_HEADS * V_DIM, result, in_v)
            keep_inputs(ring + place * CHANNELS, own_q, own_k, own_v, i, j, in_k, in_v, key_head, head, own, K_HEADS,
                        K_DIM, V_DIM)  # fmt: skip
            tl.store(stash + place * GATES + of_b, b.to(kind))
            tl.store(stash + place * GATES + of_a, a.to(kind))
            if (at == new - 1) & (following == 0):  # rows that fill up a graph get the last real row's result
                for copy in range(s + new, rows):
                    tl.store(to + (copy - s) * V_HEADS * V_DIM, result, in_v)


def verify(
    shape: DeltaRule, weights: DeltaWeights, rows: tuple[Tensor, Tensor], batch: KernelBatch, which: range,
    state: DeltaState, out: Tensor, *, before: bool = False,
) -> None:  # fmt: skip
    """Sequences `which`: rows that decode and rows of draft tokens, or, with `before`, what chunks of prompts go on
    from. rows: projections and gates."""
    assert batch.state_lens is not None
    named, places = constants(shape), state.inputs.shape[1]
    warps = max(1, min(16, shape.padded_head // ELEMENTS_PER_WARP))
    _verify[(len(which), shape.v_heads)](
        *rows, *weights, batch.query_starts, batch.seq_lens, batch.slots, batch.state_lens, *state, out,
        which.start, which.stop, *(each.stride(0) for each in state), shape.k_dim**-0.5, UNIT_EPS, shape.norm.eps,
        V_HEADS=shape.v_heads, CHANNELS=shape.channels, PROJECTED=rows[0].shape[1], GATES=rows[1].shape[1], **named,
        TAPS=triton.next_power_of_2(shape.conv), PLACES=places, BEFORE=int(before),
        RUN=triton.next_power_of_2((places - shape.conv) // 2 + 1), num_warps=warps, maxnreg=MAX_REGISTERS,
        **overlapped(out.device),
    )  # fmt: skip
