"""`GpuNgrams`: what n-grams give to residual streams, on a GPU, inside CUDA graphs too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.batch_layout import TokenBatch
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.step_rows import StepRows
from tandem.mechanisms.ngrams.gpu.staged import StagedRows
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import LEAST_GATE, NgramWeights

CHANNELS = 1024  # of a program that convolves


@triton.jit
def _give(projected, queries, key_norm, given_norm, out, new, ring, positions, slots, width, ring_slot, eps,
          root, LEAST: tl.constexpr, HIDDEN: tl.constexpr, N: tl.constexpr, PLACES: tl.constexpr, KEPT: tl.constexpr,
          BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """The part of the value that a stream of a row gets, by the product of its normed key and query; and the same
    normed, which the convolution takes. KEPT: that goes into the sequence's ring, too."""
    t, i, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, of_stream = d < HIDDEN, i * HIDDEN + d
    by_key = tl.load(key_norm + of_stream, inside, other=0.0)
    by_given = tl.load(given_norm + of_stream, inside, other=0.0)
    begin(OVERLAP)
    kind: tl.constexpr = out.dtype.element_ty
    key = tl.load(projected + t * width + of_stream, inside, other=0.0).to(tl.float32)
    key = (key * tl.rsqrt(tl.sum(key * key) / HIDDEN + eps) * by_key).to(kind).to(tl.float32)
    at = t * N * HIDDEN + of_stream
    product = tl.sum(key * tl.load(queries + at, inside, other=0.0).to(tl.float32)) / root
    size = tl.sqrt(tl.maximum(tl.abs(product), LEAST))
    gate = tl.sigmoid(tl.where(product > 0, size, tl.where(product < 0, -size, 0.0))).to(kind).to(tl.float32)
    value = tl.load(projected + t * width + N * HIDDEN + d, inside, other=0.0).to(tl.float32)
    part = (gate * value).to(kind)
    wide = part.to(tl.float32)
    unit = (wide * tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps) * by_given).to(kind)
    tl.store(out + at, part, inside)
    tl.store(new + at, unit, inside)
    if KEPT:
        place = ring + tl.load(slots + t) * ring_slot + tl.load(positions + t) % PLACES * N * HIDDEN
        tl.store(place + of_stream, unit, inside)


@triton.jit
def _convolve(out, new, ring, taps, positions, sequences, slots, begins, firsts, ring_slot, WIDE: tl.constexpr,
              TAPS: tl.constexpr, DILATION: tl.constexpr, PLACES: tl.constexpr, SINGLE: tl.constexpr,
              BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Adds silu of a causal convolution, DILATION tokens from tap to tap. SINGLE: each row is a sequence, and all is in
    the ring; else what the step's rows made is new."""
    begin(OVERLAP)
    t, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, position = c < WIDE, tl.load(positions + t)
    sequence = t if SINGLE else tl.load(sequences + t)
    ring += tl.load(slots + sequence) * ring_slot
    since = position if SINGLE else tl.load(firsts + sequence)
    first_row = t if SINGLE else tl.load(begins + sequence)
    kind: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for back in tl.static_range(TAPS):
        token = position - back * DILATION
        weight = tl.load(taps + (TAPS - 1 - back) * WIDE + c, inside, other=0.0)
        fresh, old = inside & (token >= since), inside & (token >= 0) & (token < since)
        x = tl.load(new + (first_row + token - since) * WIDE + c, fresh, other=0.0).to(tl.float32)
        x += tl.load(ring + (token + PLACES) % PLACES * WIDE + c, old, other=0.0).to(tl.float32)
        total += x * weight
    total = total.to(kind).to(tl.float32)
    y = (total * tl.sigmoid(total)).to(kind).to(tl.float32)
    at = out + t * WIDE + c
    tl.store(at, (tl.load(at, inside, other=0.0).to(tl.float32) + y).to(kind), inside)


class GpuNgrams:
    """`Ngrams` in bfloat16 or float32."""

    def __init__(self, shape: Ngram, weights: NgramWeights, device: torch.device) -> None:
        self._shape, self._weights = shape, weights._replace(taps=weights.taps.contiguous())
        self.staged = StagedRows(shape, weights, device)

    def entries(self, batch: TokenBatch, rows: StepRows, ids: Tensor) -> Tensor:
        """As `Ngrams`. Without a GPU nobody has begun the step."""
        if not batch.input_ids.is_cuda:
            self.staged.begin(batch, False)
        return self.staged.rows(len(batch.input_ids))

    def additions(self, projected: Tensor, x: Tensor, rows: StepRows, ring: Tensor) -> Tensor:
        """As `Ngrams`."""
        s, w, projected, x = self._shape, self._weights, projected.contiguous(), x.contiguous()
        out, new = torch.empty_like(x), torch.empty_like(x)
        _give[(len(x), s.streams)](
            projected, x, w.key_norm, w.given_norm, out, new, ring, rows.positions, rows.slots, projected.shape[1],
            ring.stride(0), s.norm.eps, s.hidden**0.5, LEAST=LEAST_GATE, HIDDEN=s.hidden, N=s.streams,
            PLACES=ring.shape[1], KEPT=rows.row_per_sequence, BLOCK=triton.next_power_of_2(s.hidden), num_warps=8,
            **overlapped(x.device),
        )  # fmt: skip
        block = min(CHANNELS, triton.next_power_of_2(s.channels))
        _convolve[(len(x), triton.cdiv(s.channels, block))](
            out, new, ring, w.taps, rows.positions, rows.sequence, rows.slots, rows.begins, rows.first,
            ring.stride(0), WIDE=s.channels, TAPS=s.taps, DILATION=s.dilation, PLACES=ring.shape[1],
            SINGLE=rows.row_per_sequence, BLOCK=block, num_warps=4, **overlapped(x.device),
        )  # fmt: skip
        if not rows.row_per_sequence:
            rows.keep(ring, new.flatten(1))
        return out
