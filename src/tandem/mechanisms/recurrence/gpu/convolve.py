"""Causal convolutions of channels over their last tokens, on a GPU, with what stands around them.

Rows that decode are one kernel. A row of a draft token finds rows before it in the step: neighbours of one slot. Its
own input's place in the ring is that of a token that no such neighbour asks for. A prompt's rows are read while the
ring still has the tokens before, so their last inputs are kept by a second kernel.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.attention_prefill import SEQUENCES, sequence_of
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.recurrence.torch import Taps

ROWS, COLUMNS, CHANNELS_AT_ONCE = 32, 64, 256  # of a prompt's program; of a row's


@triton.jit
def _given(rows, at, c, mask, stride, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """Convolution input of rows `at`, as the ring has it, in float32. GATED: values, times the gate before."""
    x = tl.load(rows + at * stride + c, mask, other=0.0)
    if GATED:
        values = tl.load(rows + at * stride + 2 * CHANNELS + c, mask, other=0.0)
        x = (x.to(tl.float32) * values.to(tl.float32)).to(rows.dtype.element_ty)
    return x.to(tl.float32)


@triton.jit
def _leave(mixed, out, to, rows, at, c, mask, stride, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """Rows `to` of out: the rounded convolution's silu, or the convolution times the gate behind of rows `at`."""
    kind: tl.constexpr = rows.dtype.element_ty
    y = mixed.to(kind).to(tl.float32)
    if GATED:
        y = y * tl.load(rows + at * stride + CHANNELS + c, mask, other=0.0).to(tl.float32)
    else:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out + to * CHANNELS + c, y.to(kind).to(out.dtype.element_ty), mask)


@triton.jit
def _decode_convolved(rows, ring, taps, out, lens, slots, copied, stride, ring_stride, CHANNELS: tl.constexpr,
                      TAPS: tl.constexpr, PLACES: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
                      CB: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """copied: each row itself, or the one that it is a copy of."""
    begin(OVERLAP)
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * CB + tl.arange(0, CB)
    inside, at = c < CHANNELS, tl.load(copied + row)
    slot, length = tl.load(slots + at), tl.load(lens + at)
    ring_at = ring + slot.to(tl.int64) * ring_stride + c
    own = _given(rows, at, c, inside, stride, CHANNELS, GATED)
    mixed = own * tl.load(taps + (TAPS - 1) * CHANNELS + c, inside, other=0.0)
    for back in tl.static_range(1, TAPS):
        before = tl.maximum(at - back, 0)
        follows = (at >= back) & (tl.load(slots + before) == slot) & (tl.load(lens + before) + back == length)
        new = _given(rows, before, c, inside, stride, CHANNELS, GATED)
        old = tl.load(ring_at + (length - 1 - back + PLACES) % PLACES * CHANNELS, inside, other=0.0).to(tl.float32)
        old = tl.where(follows, new, tl.where(length > back, old, 0.0))
        mixed += old * tl.load(taps + (TAPS - 1 - back) * CHANNELS + c, inside, other=0.0)
    if BIASED:
        mixed += tl.load(taps + TAPS * CHANNELS + c, inside, other=0.0)
    tl.store(ring_at + (length - 1) % PLACES * CHANNELS, own.to(ring.dtype.element_ty), inside)
    _leave(mixed, out, row, rows, at, c, inside, stride, CHANNELS, GATED)


@triton.jit(do_not_specialize=["first", "sequences"])
def _prompt_convolved(rows, ring, taps, out, starts, lens, slots, first, sequences, stride, ring_stride,
                      CHANNELS: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, BIASED: tl.constexpr,
                      GATED: tl.constexpr, ROWS: tl.constexpr, CB: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), ROWS, AT_ONCE)
    s += first
    if s >= sequences:
        return
    start = tl.load(starts + s)
    n = tl.load(starts + s + 1) - start
    known, t = tl.load(lens + s) - n, (block * ROWS + tl.arange(0, ROWS))[:, None]
    c = (tl.program_id(1) * CB + tl.arange(0, CB))[None, :]
    inside, at = (t < n) & (c < CHANNELS), (start + t).to(tl.int64)
    ring_at = ring + tl.load(slots + s).to(tl.int64) * ring_stride + c
    mixed = _given(rows, at, c, inside, stride, CHANNELS, GATED)
    mixed *= tl.load(taps + (TAPS - 1) * CHANNELS + c, c < CHANNELS, other=0.0)
    for back in tl.static_range(1, TAPS):
        x = _given(rows, at - back, c, inside & (t >= back), stride, CHANNELS, GATED)
        place = (known + t - back + PLACES) % PLACES
        x += tl.load(ring_at + place * CHANNELS, inside & (t < back) & (known + t >= back), other=0.0).to(tl.float32)
        mixed += x * tl.load(taps + (TAPS - 1 - back) * CHANNELS + c, c < CHANNELS, other=0.0)
    if BIASED:
        mixed += tl.load(taps + TAPS * CHANNELS + c, c < CHANNELS, other=0.0)
    _leave(mixed, out, at, rows, at, c, inside, stride, CHANNELS, GATED)


@triton.jit(do_not_specialize=["first"])
def _prompt_kept(rows, ring, starts, lens, slots, first, stride, ring_stride, CHANNELS: tl.constexpr,
                 PLACES: tl.constexpr, GATED: tl.constexpr, PB: tl.constexpr, CB: tl.constexpr):  # fmt: skip
    """The last inputs of each sequence from `first` on."""
    s, c = tl.program_id(0) + first, (tl.program_id(1) * CB + tl.arange(0, CB))[None, :]
    start, end, back = tl.load(starts + s), tl.load(starts + s + 1), tl.arange(0, PB)[:, None]
    mask = (c < CHANNELS) & (back < PLACES) & (end - 1 - back >= start)
    x = _given(rows, (end - 1 - back).to(tl.int64), c, mask, stride, CHANNELS, GATED)
    place = (tl.load(lens + s) - 1 - back) % PLACES
    ring_at = ring + tl.load(slots + s).to(tl.int64) * ring_stride
    tl.store(ring_at + place * CHANNELS + c, x.to(ring.dtype.element_ty), mask)


def convolve(rows: Tensor, step: StepContext, ring: Tensor, taps: Taps, out: Tensor, *, gated: bool) -> None:
    """rows [T, C], or [T, 3 C] gated: as `StateUpdates.convolved` and `StateUpdates.gated`; the columns lie side by
    side. ring: its rows do, too. Of sequences that follow each other in one slot, a run is no longer than the ring has
    places beyond the taps."""
    batch, (places, channels) = step.batch, ring.shape[1:]
    shape: dict[str, Any] = {"CHANNELS": channels, "PLACES": places, "GATED": gated}
    sequences = len(batch.seq_lens)
    single = sequences if sequences == len(rows) else batch.single_rows
    summed = {"TAPS": len(taps.weights), "BIASED": taps.biased, **shape}
    strides = rows.stride(0), ring.stride(0)
    if single:
        blocks = triton.cdiv(channels, CHANNELS_AT_ONCE)
        _decode_convolved[(single, blocks)](
            rows, ring, taps.rows, out, batch.seq_lens, batch.slots, step.rows.copied, *strides, **summed,
            CB=CHANNELS_AT_ONCE, num_warps=4, **overlapped(rows.device),
        )  # fmt: skip
    if single == sequences:
        return
    layout, blocks = (batch.query_starts, batch.seq_lens, batch.slots), triton.cdiv(channels, COLUMNS)
    others = sequences - single
    _prompt_convolved[((len(rows) - single) // ROWS + others, blocks)](
        rows, ring, taps.rows, out, *layout, single, sequences, *strides, **summed, ROWS=ROWS, CB=COLUMNS,
        AT_ONCE=SEQUENCES, num_warps=4,
    )  # fmt: skip
    _prompt_kept[(others, blocks)](
        rows, ring, *layout, single, *strides, **shape, PB=triton.next_power_of_2(places), CB=COLUMNS, num_warps=4
    )
