"""Gated residual streams on a GPU: one kernel joins a block's result to the streams, and norms them. One product makes
gates and shares. For few rows one more kernel makes all else that a block takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, let_next_start, overlapped, wait_for_last
from tandem.kernels.gpu.linear import GpuLinear
from tandem.kernels.ops import Ops
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.mechanisms.gated_streams.torch import GatedMix, GatedWeights, ReturningRows, Shares

FEW_ROWS = 4  # up to here each row reads the matrix of gates; then cuBLAS reads it once for many rows
CHANNELS = 8  # of each stream, for a program that multiplies
MEAN_CHANNELS = 1024  # for one that does not


@triton.jit
def _join(streams, y, share, norm, out, normed, hidden, eps, N: tl.constexpr, LEAVE: tl.constexpr, BLOCK: tl.constexpr,
          OVERLAP: tl.constexpr):  # fmt: skip
    """A stream of a row, with its share of y, and its norm."""
    t, i, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, row = d < hidden, (t * N + i) * hidden
    weight = tl.load(norm + i * hidden + d, inside, other=0.0)
    begin(OVERLAP)
    kind: tl.constexpr = streams.dtype.element_ty
    value = tl.load(streams + row + d, inside, other=0.0)
    if LEAVE:
        part = tl.load(y + t * hidden + d, inside, other=0.0).to(tl.float32) * tl.load(share + t * N + i).to(tl.float32)
        value = (value.to(tl.float32) + part.to(kind).to(tl.float32)).to(kind)
        tl.store(out + row + d, value, inside)
    wide = value.to(tl.float32)
    unit = wide * tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
    tl.store(normed + row + d, (unit * weight.to(tl.float32)).to(kind), inside)


@triton.jit
def _activated(projected, i, inside, kind: tl.constexpr, N: tl.constexpr):
    """silu of an N-th of numbers, rounded before and after, float32."""
    x = (tl.load(projected + i, inside, other=0.0).to(tl.float32) / N).to(kind).to(tl.float32)
    return (x * tl.sigmoid(x)).to(kind).to(tl.float32)


@triton.jit
def _store_shares(projected, share, RANK: tl.constexpr, N: tl.constexpr, NP: tl.constexpr):
    i = tl.arange(0, NP)
    kind: tl.constexpr = share.dtype.element_ty
    x = (tl.load(projected + RANK + i, i < N, other=0.0).to(tl.float32) / N).to(kind).to(tl.float32)
    tl.store(share + i, (2 * tl.sigmoid(x).to(kind).to(tl.float32)).to(kind), i < N)


@triton.jit
def _take(projected, matrix, normed, out, share, hidden, width, RANK: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
          INJECT: tl.constexpr, DEPTH: tl.constexpr, CHANNELS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Channels of a block's row: the mean of what passes the gates, which the matrix [N * hidden, RANK] makes. It is
    read before the kernel before has ended."""
    let_next_start(OVERLAP)
    q, r, t = tl.arange(0, NP * CHANNELS), tl.arange(0, DEPTH), tl.program_id(1).to(tl.int64)
    i, d = q // CHANNELS, tl.program_id(0) * CHANNELS + q % CHANNELS
    inside, at = (i < N) & (d < hidden), i * hidden + d
    w = tl.load(matrix + at[:, None].to(tl.int64) * RANK + r[None, :], inside[:, None] & (r < RANK)[None, :], other=0.0)
    wait_for_last(OVERLAP)
    kind: tl.constexpr = out.dtype.element_ty
    row = projected + t * width
    x = _activated(row, r, r < RANK, kind, N)
    z = tl.sum(w.to(tl.float32) * x[None, :], 1).to(kind).to(tl.float32)
    value = tl.load(normed + t * N * hidden + at, inside, other=0.0).to(tl.float32)
    passed = tl.where(inside, (tl.sigmoid(z).to(kind).to(tl.float32) * value).to(kind).to(tl.float32), 0.0)
    mean = tl.sum(tl.reshape(passed, [NP, CHANNELS]), 0) / N
    to = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    tl.store(out + t * hidden + to, mean.to(kind), to < hidden)
    if tl.program_id(0) < INJECT:
        _store_shares(row, share + t * N, RANK, N, NP)


@triton.jit
def _activate(projected, out, share, width, RANK: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
              INJECT: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Inputs of the second product, and shares."""
    begin(OVERLAP)
    t, r = tl.program_id(0).to(tl.int64), tl.arange(0, DEPTH)
    kind: tl.constexpr = out.dtype.element_ty
    row = projected + t * width
    tl.store(out + t * RANK + r, _activated(row, r, r < RANK, kind, N).to(kind), r < RANK)
    if INJECT:
        _store_shares(row, share + t * N, RANK, N, NP)


@triton.jit
def _mean(gates, normed, out, hidden, N: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """The mean of what passes gates, which are sigmoids of numbers [T, N * hidden]."""
    begin(OVERLAP)
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = d < hidden, tl.zeros([BLOCK], tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    for i in tl.static_range(N):
        at = (t * N + i) * hidden + d
        gate = tl.sigmoid(tl.load(gates + at, inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        total += (gate * tl.load(normed + at, inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + t * hidden + d, (total / N).to(kind), inside)


def joined(streams: Tensor, leaving: ReturningRows | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Streams [T, n, hidden] after what is leaving has joined them, and each normed by itself."""
    streams = streams.contiguous()
    rows, n, hidden = streams.shape
    normed, out = torch.empty_like(streams), streams if leaving is None else torch.empty_like(streams)
    y, share = (streams, streams) if leaving is None else (leaving.y.contiguous(), leaving.shares.share.contiguous())
    block = triton.next_power_of_2(hidden)
    _join[(rows, n)](
        streams, y, share, norm, out, normed, hidden, eps, N=n, LEAVE=leaving is not None, BLOCK=block,
        num_warps=min(8, max(1, block // 512)), **overlapped(streams.device),
    )  # fmt: skip
    return out, normed


class GpuGatedMix:
    """`GatedMix` in bfloat16 or float32."""

    def __init__(self, shape: GatedStreams, weights: GatedWeights | None) -> None:
        self._shape, self._weights = shape, weights

    def advanced(
        self, streams: Tensor, leaving: ReturningRows | None, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Shares | None]:
        """As `GatedMix`."""
        weights = self._weights
        assert weights is not None
        streams, normed = joined(streams, leaving, norm, eps)
        projected = weights.down(normed.flatten(1)).contiguous()
        out, share = normed.new_empty(len(normed), normed.shape[2]), normed.new_empty(len(normed), normed.shape[1])
        if len(normed) <= FEW_ROWS and isinstance(weights.up, GpuLinear) and weights.up.weight.dtype == normed.dtype:
            self._few(projected, weights.up.weight, normed, out, share)
        else:
            self._many(projected, normed, out, share)
        return streams, out, Shares(share) if weights.inject else None

    def normed(self, streams: Tensor, norm: Tensor, eps: float) -> Tensor:
        """As `GatedMix`."""
        return joined(streams, None, norm, eps)[1]

    def _sizes(self, device: torch.device) -> dict[str, object]:
        n, rank, inject = self._shape.streams, self._shape.rank, int(self._weights is not None and self._weights.inject)
        sizes = {"RANK": rank, "N": n, "NP": triton.next_power_of_2(n), "DEPTH": triton.next_power_of_2(rank)}
        return sizes | {"INJECT": inject, **overlapped(device)}

    def _few(self, projected: Tensor, matrix: Tensor, normed: Tensor, out: Tensor, share: Tensor) -> None:
        rows, hidden = out.shape
        _take[(triton.cdiv(hidden, CHANNELS), rows)](
            projected, matrix, normed, out, share, hidden, projected.shape[1], CHANNELS=CHANNELS, num_warps=8,
            **self._sizes(out.device),
        )  # fmt: skip

    def _many(self, projected: Tensor, normed: Tensor, out: Tensor, share: Tensor) -> None:
        assert self._weights is not None
        rows, hidden = out.shape
        activated = out.new_empty(rows, self._shape.rank)
        _activate[(rows,)](projected, activated, share, projected.shape[1], num_warps=1, **self._sizes(out.device))
        block = min(MEAN_CHANNELS, triton.next_power_of_2(hidden))
        _mean[(rows, triton.cdiv(hidden, block))](
            self._weights.up(activated).contiguous(), normed, out, hidden, N=self._shape.streams, BLOCK=block,
            num_warps=4, **overlapped(out.device),
        )  # fmt: skip


def bound(ops: Ops, shape: GatedStreams, weights: GatedWeights | None = None) -> GatedMix:
    return GpuGatedMix(shape, weights)
