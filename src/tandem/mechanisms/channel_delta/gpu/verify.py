"""Rows of sequences that may draft: as `channels.py` and `folds.py` in one kernel, for runs of rows of one slot.

A program has some columns of one head's memory. It takes in the draft tokens accepted since, from what was kept of
them. It takes in the run's first row, too, and stores the memory. The draft tokens behind it go on in registers. A
second kernel keeps what they were given: the place of the furthest is that of the first one that the first kernel still
reads.

All tokens pass through one loop, so a token that is taken in later is taken in with the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.mechanisms.channel_delta.torch import ChannelGates, ChannelState, ChannelWeights
from tandem.mechanisms.delta_net.gpu.parts import softplus
from tandem.mechanisms.delta_net.torch import UNIT_EPS
from tandem.mechanisms.recurrence.gpu.runs import span

COLUMNS = 32  # of a memory that a program holds
NUMBERS = 1024  # of a row that a program keeps


@triton.jit
def _of(kept, new, at, c, inside):
    """Numbers c of a token, float32: kept ones where it is before the rows."""
    old = tl.load(kept + c, inside & (at < 0), other=0.0).to(tl.float32)
    return old + tl.load(new + c, inside & (at >= 0), other=0.0).to(tl.float32)  # one of the two is 0


@triton.jit
def _unit(x, scale, unit_eps):
    return x * (tl.rsqrt(tl.sum(x * x) + unit_eps) * scale)


@triton.jit(do_not_specialize=["first", "rows"])
def _verify(mixed, forget, beta, decay, bias, kept_mixed, kept_forget, kept_beta, memory, out, starts, lens, slots,
            state_lens, first, rows, beta_stride, mixed_slot, forget_slot, beta_slot, memory_slot, scale, unit_eps,
            floor, HEADS: tl.constexpr, DIM: tl.constexpr, PLACES: tl.constexpr, RUN: tl.constexpr,
            BEFORE: tl.constexpr, BOUNDED: tl.constexpr, DB: tl.constexpr, CB: tl.constexpr,
            OVERLAP: tl.constexpr):  # fmt: skip
    """BEFORE 1: sequences from `first` on are chunks of prompts; only what came before them is taken in. BOUNDED: no
    logarithm of a decay is below `floor`."""
    begin(OVERLAP)
    s, head = tl.program_id(0) // HEADS + first, tl.program_id(0) % HEADS
    slot, done = tl.load(slots + s).to(tl.int64), tl.load(state_lens + s)
    known, new = span(starts, lens, slots, s, rows, slot, RUN, BEFORE)
    k, v = tl.arange(0, DB), tl.program_id(1) * CB + tl.arange(0, CB)
    in_k, in_v = k < DIM, v < DIM
    inner = in_k[:, None] & in_v[None, :]
    row = s.to(tl.int64)
    to = out + (row * HEADS + head) * DIM + v
    if slot == 0:  # it fills up a graph
        if tl.load(slots) == 0:  # there is no real row at all
            tl.store(to, tl.zeros_like(v).to(tl.float32), in_v)
        return
    if (tl.load(slots + s - 1, s > 0, other=-1) == slot) & (BEFORE == 0):  # within a run
        return
    memory_at = memory + slot * memory_slot + (head * DIM + k[:, None]) * DIM + v[None, :]
    state = tl.load(memory_at, inner & (done > 0), other=0.0)
    own_bias, rate = tl.load(bias + head * DIM + k, in_k, other=0.0), tl.load(decay + head)
    kind: tl.constexpr = kept_beta.dtype.element_ty
    for position in range(done, known + new):
        at, place = position - known, position % PLACES
        old, this = kept_mixed + slot * mixed_slot + place * 3 * HEADS * DIM, mixed + (row + at) * 3 * HEADS * DIM
        q = _unit(_of(old, this, at, head * DIM + k, in_k), scale, unit_eps)
        w = _unit(_of(old, this, at, (HEADS + head) * DIM + k, in_k), 1.0, unit_eps)
        added = _of(old, this, at, (2 * HEADS + head) * DIM + v, in_v)
        old, this = kept_forget + slot * forget_slot + place * HEADS * DIM, forget + (row + at) * HEADS * DIM
        x = _of(old, this, at, head * DIM + k, in_k) + own_bias
        log = floor * tl.sigmoid(-rate * x) if BOUNDED else softplus(x) * rate
        b = _of(kept_beta + slot * beta_slot + place * HEADS, beta + (row + at) * beta_stride, at, head, True)
        state *= tl.exp(log)[:, None]
        added = (added - tl.sum(state * w[:, None], 0)) * tl.sigmoid(b).to(kind).to(tl.float32)
        state += w[:, None] * added[None, :]
        if at == -BEFORE:  # the last one that is sure
            tl.store(memory_at, state, inner)
        if at >= 0:
            tl.store(to + at * HEADS * DIM, tl.sum(state * q[:, None], 0), in_v)


@triton.jit
def _row_into(kept, x, c, CHANNELS: tl.constexpr):
    tl.store(kept + c, tl.load(x + c, c < CHANNELS, other=0.0), c < CHANNELS)


@triton.jit
def _keep(mixed, forget, beta, kept_mixed, kept_forget, kept_beta, lens, slots, beta_stride, mixed_slot, forget_slot,
          beta_slot, HEADS: tl.constexpr, DIM: tl.constexpr, PLACES: tl.constexpr, CB: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    """A draft token's numbers, as they were given, into the place of its position."""
    begin(OVERLAP)
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * CB + tl.arange(0, CB)
    slot, place = tl.load(slots + row).to(tl.int64), (tl.load(lens + row) - 1) % PLACES
    if (slot == 0) | (tl.load(slots + row - 1, row > 0, other=-1) != slot):  # of nobody, or sure
        return
    inner: tl.constexpr = HEADS * DIM
    _row_into(kept_mixed + slot * mixed_slot + place * 3 * inner, mixed + row * 3 * inner, c, 3 * inner)
    _row_into(kept_forget + slot * forget_slot + place * inner, forget + row * inner, c, inner)
    _row_into(kept_beta + slot * beta_slot + place * HEADS, beta + row * beta_stride, c, HEADS)


def verify(
    mixed: Tensor, gates: ChannelGates, batch: KernelBatch, which: range, state: ChannelState, weights: ChannelWeights,
    out: Tensor, *, before: bool = False,
) -> None:  # fmt: skip
    """Sequences `which`: rows that decode and rows of draft tokens, or, with `before`, what chunks of prompts go on
    from. mixed and gates.forget: contiguous. out: float32 [T, H, D], what memories answer."""
    assert batch.state_lens is not None
    heads, dim, places = len(weights.decay), len(weights.norm), state.mixed.shape[1]
    rows, slots = (mixed, gates.forget, gates.beta), [each.stride(0) for each in state]
    columns = min(COLUMNS, max(16, triton.next_power_of_2(dim)))
    sizes = {"HEADS": heads, "DIM": dim, "PLACES": places, **overlapped(out.device)}
    _verify[(len(which) * heads, triton.cdiv(dim, columns))](
        *rows, weights.decay, weights.bias, *state, out, batch.query_starts, batch.seq_lens, batch.slots,
        batch.state_lens, which.start, which.stop, gates.beta.stride(0), *slots, dim**-0.5, UNIT_EPS, weights.floor,
        RUN=triton.next_power_of_2(places // 2 + 1), BEFORE=int(before), BOUNDED=weights.floor < 0,
        DB=max(16, triton.next_power_of_2(dim)), CB=columns, num_warps=4, **sizes,
    )  # fmt: skip
    if before:
        return
    _keep[(len(which), triton.cdiv(3 * heads * dim, NUMBERS))](
        *rows, *state[:3], batch.seq_lens, batch.slots, gates.beta.stride(0), *slots[:3], CB=NUMBERS, num_warps=4,
        **sizes,
    )  # fmt: skip
