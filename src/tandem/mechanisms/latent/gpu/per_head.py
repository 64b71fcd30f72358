"""A matrix of each head times few rows: weights are read once, while the kernel before still runs.

Rows are multiplied 16 at a time, so a row has the same bits beside any others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped

ROWS = 16  # of one product on tensor cores
MOST_ROWS = 128  # of a program, one product after the other; more rows are another program's
MANY_PROGRAMS = 512  # as many are wanted: on an H200 that is four for each multiprocessor
WIDEST = 128  # columns of a program


@triton.jit
def head_weights(weights, columns, depth, n, k, stride, FLIPPED: tl.constexpr):
    """One head's weights as [K, N]: stored as rows of outputs, or FLIPPED as rows of inputs."""
    inside = (k < depth)[:, None] & (n < columns)[None, :]
    if FLIPPED:
        return tl.load(weights + k[:, None] * stride + n[None, :], inside, other=0.0)
    rows = tl.load(weights + n[:, None] * stride + k[None, :], tl.trans(inside), other=0.0)
    return tl.trans(rows)


@triton.jit(do_not_specialize=["rows"])
def _per_head(x, weights, out, rows, columns, depth, x_row, x_head, w_head, w_row, out_row, out_head,
              FLIPPED: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
              DEPTH: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    h = tl.program_id(0).to(tl.int64)
    n, k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    w = head_weights(weights + h * w_head, columns, depth, n, k, w_row, FLIPPED)
    begin(OVERLAP)
    first = tl.program_id(2) * EACH
    for start in range(first, tl.minimum(first + EACH, rows), ROWS):
        t = start + tl.arange(0, ROWS).to(tl.int64)
        at = x + h * x_head + t[:, None] * x_row + k[None, :]
        part = tl.load(at, (t < rows)[:, None] & (k < depth)[None, :], other=0.0)
        y = tl.dot(part, w, input_precision=PRECISION)
        to = out + h * out_head + t[:, None] * out_row + n[None, :]
        tl.store(to, y.to(out.dtype.element_ty), (t < rows)[:, None] & (n < columns)[None, :])


def block_of(heads: int, columns: int) -> int:
    """Columns of a program: as many as leave enough programs."""
    block = max(16, min(WIDEST, 1 << (columns - 1).bit_length()))
    while block > 16 and heads * -(-columns // block) < MANY_PROGRAMS:
        block //= 2
    return block


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype is torch.float32 else "tf32"


def per_head(x: Tensor, weights: Tensor, out: Tensor, flipped: bool = False) -> Tensor:
    """x [T, H, K] times weights [H, N, K], or flipped [H, K, N], into out [T, H, N]; all may be parts of others, whose
    last dimension is contiguous."""
    rows, heads, depth = x.shape
    columns = out.shape[2]
    if not rows:
        return out
    block = block_of(heads, columns)
    _per_head[(heads, triton.cdiv(columns, block), triton.cdiv(rows, MOST_ROWS))](
        x, weights, out, rows, columns, depth, x.stride(0), x.stride(1), weights.stride(0), weights.stride(1),
        out.stride(0), out.stride(1), FLIPPED=flipped, ROWS=ROWS, EACH=MOST_ROWS, BLOCK=block,
        DEPTH=max(16, triton.next_power_of_2(depth)), PRECISION=precision(x), num_warps=4, num_stages=1,
        **overlapped(x.device),
    )  # fmt: skip
    return out
