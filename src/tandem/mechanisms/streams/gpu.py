"""Hyper-connections on a GPU: a block's result joins the streams, they are weighed, and the next block's rows are
normed. Two kernels: the first divides channels among programs, the second has a row to itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, let_next_start, overlapped, wait_for_last
from tandem.kernels.gpu.linear import GpuLinear
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperStreams, HyperWeights, RowNorm, StreamMix, StreamResult

FEW_ROWS = 16  # up to here the first kernel also multiplies; then cuBLAS reads the matrix once for many rows
FEW_CHANNELS, MANY_CHANNELS = 64, 1024  # of a program of the first kernel


@triton.jit
def _join(streams, y, share, mixing, matrix, out, products, squares, hidden,
          N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, LEAVE: tl.constexpr, MULTIPLY: tl.constexpr,
          BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Streams i' = share i * y + the sum over j of mixing[j, i] * stream j; of these channels, what the matrix [M, n *
    hidden] makes of all streams, and their squares' sum. The matrix is read before the kernel before has ended."""
    let_next_start(OVERLAP)
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, m = tl.arange(0, NP * BLOCK), tl.arange(0, M)
    i, d = k // BLOCK, part * BLOCK + k % BLOCK
    inside, row, to = (i < N) & (d < hidden), t * N * hidden, i * hidden + d
    if MULTIPLY:
        w = tl.load(matrix + m[:, None] * (N * hidden) + to[None, :], inside[None, :], other=0.0)
    wait_for_last(OVERLAP)
    kind: tl.constexpr = streams.dtype.element_ty
    if LEAVE:
        value = tl.load(share + t * N + i, inside, other=0.0)
        value *= tl.load(y + t * hidden + d, inside, other=0.0).to(tl.float32)
        for j in tl.static_range(N):
            other = tl.load(streams + row + j * hidden + d, inside, other=0.0).to(tl.float32)
            value += tl.load(mixing + (t * N + j) * N + i, inside, other=0.0) * other
        value = value.to(kind)
        tl.store(out + row + to, value, inside)
    else:
        value = tl.load(streams + row + to, inside, other=0.0)
    wide, at = value.to(tl.float32), t * tl.num_programs(1) + part
    tl.store(squares + at, tl.sum(wide * wide))
    if MULTIPLY:
        tl.store(products + at * M + m, tl.sum(w * wide[None, :], 1))


@triton.jit
def _sums(products, t, at, parts, M: tl.constexpr, PARTS: tl.constexpr):
    """[len(at)]: sums of all parts' products."""
    p = tl.arange(0, PARTS)
    partial = tl.load(products + (t * parts + p[:, None]) * M + at[None, :], (p < parts)[:, None], other=0.0)
    return tl.sum(partial, 0)


@triton.jit
def _balanced(logits, mask, eps, ITERATIONS: tl.constexpr):
    """[NP, NP], of which `mask` counts: rows and columns that add up to about 1."""
    x = tl.exp(logits - tl.max(logits, 1)[:, None])
    x = tl.where(mask, x / tl.sum(x, 1)[:, None] + eps, 0.0)
    x = x / (tl.sum(x, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        x = x / (tl.sum(x, 1)[:, None] + eps)
        x = x / (tl.sum(x, 0)[None, :] + eps)
    return x


@triton.jit
def _normed_sum(streams, products, scale, base, norm, out, hidden, parts, inverse, t, eps, norm_eps, N: tl.constexpr,
                NP: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The normed sum of the streams, which a block takes. norm [BLOCK]: the weight."""
    d, i = tl.arange(0, BLOCK), tl.arange(0, NP)
    inside, x, at = d < hidden, tl.zeros([BLOCK], tl.float32), tl.minimum(i, M - 1)
    logits = _sums(products, t, at, parts, M, PARTS) * inverse * tl.load(scale + at) + tl.load(base + at)
    weights = tl.sigmoid(logits) + eps
    for j in tl.static_range(N):
        weight = tl.sum(tl.where(i == j, weights, 0.0))
        x += weight * tl.load(streams + (t * N + j) * hidden + d, inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    x = x.to(kind).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / hidden + norm_eps)
    if norm.dtype != tl.float32:
        x = x.to(kind).to(tl.float32)
    tl.store(out + t * hidden + d, (x * norm.to(tl.float32)).to(kind), inside)


@triton.jit
def _returns(products, scale, base, share, mixing, parts, inverse, t, eps, N: tl.constexpr, NP: tl.constexpr,
             M: tl.constexpr, PARTS: tl.constexpr, ITERATIONS: tl.constexpr):  # fmt: skip
    """How a block's result returns to the streams, and how these mix."""
    i = tl.arange(0, NP)
    at = tl.minimum(N + i, M - 1)
    logits = _sums(products, t, at, parts, M, PARTS) * inverse * tl.load(scale + at) + tl.load(base + at)
    tl.store(share + t * N + i, 2.0 * tl.sigmoid(logits), i < N)
    k = tl.arange(0, NP * NP)
    mask, at = (k // NP < N) & (k % NP < N), tl.minimum(2 * N + k // NP * N + k % NP, M - 1)
    logits = _sums(products, t, at, parts, M, PARTS) * inverse * tl.load(scale + at) + tl.load(base + at)
    grid = tl.reshape(tl.where(mask, logits, float("-inf")), [NP, NP])
    row, column = tl.arange(0, NP)[:, None], tl.arange(0, NP)[None, :]
    whole = (row < N) & (column < N)
    grid = tl.where(row < N, grid, 0.0)
    tl.store(mixing + (t * N + row) * N + column, _balanced(grid, whole, eps, ITERATIONS), whole)


@triton.jit
def _weigh(streams, products, squares, scale, base, norm, share, mixing, out, hidden, parts, square_parts, stream_eps,
           eps, norm_eps, N: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr,
           SQUARE_PARTS: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    """Two programs of a row: the normed sum, and beside it what is needed later, which takes as long."""
    d = tl.arange(0, BLOCK)
    by = tl.load(norm + d, d < hidden, other=0.0)
    begin(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, SQUARE_PARTS)
    square = tl.sum(tl.load(squares + t * square_parts + p, p < square_parts, other=0.0))
    inverse = tl.rsqrt(square / (N * hidden) + stream_eps)
    if tl.program_id(1) == 0:
        _normed_sum(streams, products, scale, base, by, out, hidden, parts, inverse, t, eps, norm_eps, N, NP, M, PARTS,
                    BLOCK)  # fmt: skip
    else:
        _returns(products, scale, base, share, mixing, parts, inverse, t, eps, N, NP, M, PARTS, ITERATIONS)


class GpuHyperStreams(HyperStreams):
    """`HyperStreams` by two kernels and, for many rows, a product of PyTorch's."""

    def advanced(
        self, streams: Tensor, leaving: StreamResult | None, norm: RowNorm, last: bool = False
    ) -> tuple[Tensor, Tensor, StreamMix | None]:
        streams, products, squares = self._joined(streams.contiguous(), leaving)
        (rows, n, hidden), shape = streams.shape, self.shape
        share, mixing = products.new_empty(rows, n), products.new_empty(rows, n, n)
        out = streams.new_empty(rows, hidden)
        parts, pairs = products.shape[1], triton.next_power_of_2(n)
        _weigh[(rows, 1 if last else 2)](
            streams, products, squares, self.weights.scale, self.weights.base, norm.weight, share, mixing, out, hidden,
            parts, squares.shape[1], shape.norm_eps, shape.eps, norm.eps, N=n, NP=pairs, M=products.shape[2],
            PARTS=triton.next_power_of_2(parts), SQUARE_PARTS=triton.next_power_of_2(squares.shape[1]),
            ITERATIONS=shape.iterations, BLOCK=triton.next_power_of_2(hidden), num_warps=8,
            **overlapped(streams.device),
        )  # fmt: skip
        return streams, out, None if last else StreamMix(share, mixing)

    def _joined(self, streams: Tensor, leaving: StreamResult | None) -> tuple[Tensor, Tensor, Tensor]:
        """The streams, what the matrix makes of parts of their channels [T, parts, M], and sums of squares
        [T, parts]."""
        project = self.weights.project
        assert isinstance(project, GpuLinear)
        (rows, n, hidden), few = streams.shape, len(streams) <= FEW_ROWS
        block = min(triton.next_power_of_2(hidden), FEW_CHANNELS if few else MANY_CHANNELS)
        parts, m = triton.cdiv(hidden, block), project.out_features
        squares = streams.new_empty((rows, parts), dtype=torch.float32)
        products = squares.new_empty((rows, parts, m)) if few else squares
        out = streams if leaving is None else torch.empty_like(streams)
        y, mix = (streams, StreamMix(squares, squares)) if leaving is None else (leaving.y.contiguous(), leaving.mix)
        _join[(rows, parts)](
            streams, y, mix.share, mix.mixing, project.weight, out, products, squares, hidden, N=n,
            NP=triton.next_power_of_2(n), M=m, LEAVE=leaving is not None, MULTIPLY=few, BLOCK=block, num_warps=4,
            **overlapped(streams.device),
        )  # fmt: skip
        return out, products if few else project(out.flatten(1).float())[:, None], squares


def bound(ops: object, shape: Hyper, weights: HyperWeights, hidden: int) -> HyperStreams:
    """hidden: channels of a stream."""
    return GpuHyperStreams(shape, weights)
