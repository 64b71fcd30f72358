"""One row times a matrix: the weights are read once, at the rate of GPU memory, and multiplied in float32.

cuBLAS takes tiles of 64 columns for one row, too few to keep all of a large GPU's memory busy. On an H200, 4096 x 2048
in bf16 took 8.7 us with it and 6.1 this way. Here the weights are also asked for before the kernel that makes the row
has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.gpu.norm import joined, normed
from tandem.kernels.joined import Normed, Sum

MANY_COLUMNS = 1024  # from here on a program takes several of them
AT_ONCE = 8192  # weights that a program has in registers
LARGE_ELEMENTS = 1 << 26  # a vocabulary's: enough tiles of cuBLAS's, which read at full rate then


@triton.jit
def _one_row(x, weight, bias, out, depth, columns, each, BIAS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
             WHOLE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    n, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    rows = weight + n[:, None].to(tl.int64) * depth
    x += tl.program_id(0) * COLUMNS // each * depth
    if WHOLE:  # columns and depth are multiples: all weights at once, while the kernel before still runs
        w = tl.load(rows + k[None, :])
        begin(OVERLAP)
        y = tl.sum(w.to(tl.float32) * tl.load(x + k).to(tl.float32)[None, :], 1)
    else:
        begin(OVERLAP)
        acc = tl.zeros([COLUMNS, STEP], tl.float32)
        for start in range(0, depth, STEP):
            at = start + k
            w = tl.load(rows + at[None, :], (n < columns)[:, None] & (at < depth)[None, :], other=0.0)
            acc += w.to(tl.float32) * tl.load(x + at, at < depth, other=0.0).to(tl.float32)[None, :]
        y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias + n, n < columns, other=0.0)
    tl.store(out + n, y.to(out.dtype.element_ty), n < columns)


@triton.jit
def _after_norm(x, residual, addend, gate, norm, weight, bias, out, stream, normed_x, depth, columns, eps,
                ADDEND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
                STEP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """All weights at once. Every program norms the row by itself; the first keeps it."""
    n, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    inside = k < depth
    inside_rows = (n < columns)[:, None] & inside[None, :]
    w = tl.load(weight + n[:, None].to(tl.int64) * depth + k[None, :], inside_rows, other=0.0)
    by = tl.load(norm + k, inside, other=0.0)
    begin(OVERLAP)
    kind: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + k, inside, other=0.0)
    value = joined(value, addend, gate, residual, k, inside, kind, ADDEND, GATED, True)
    row = normed(value, by, depth, eps, kind)
    if tl.program_id(0) == 0:
        tl.store(stream + k, value, inside)
        tl.store(normed_x + k, row, inside)
    y = tl.sum(w.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    if BIAS:
        y += tl.load(bias + n, n < columns, other=0.0)
    tl.store(out + n, y.to(out.dtype.element_ty), n < columns)


def takes_norm(s: Sum, weight: Tensor) -> bool:
    """Whether `after_norm` multiplies such rows."""
    return len(s.x) == 1 and s.x.dtype == weight.dtype and weight.shape[1] <= AT_ONCE // 2


def after_norm(s: Sum, weight: Tensor, bias: Tensor | None) -> Normed:
    """As `AfterNorm`, of a row."""
    columns, depth = weight.shape
    x, step = s.x.contiguous(), triton.next_power_of_2(depth)
    stream, row, out = torch.empty_like(x), torch.empty_like(x), x.new_empty((1, columns))
    addend, gate = (x, None) if s.addend is None else s.addend
    each = AT_ONCE // step
    _after_norm[(triton.cdiv(columns, each),)](
        x, s.residual, addend.contiguous(), x if gate is None else gate, s.weight, weight,
        weight if bias is None else bias, out, stream, row, depth, columns, s.eps,
        ADDEND=s.addend is not None, GATED=gate is not None, BIAS=bias is not None, COLUMNS=each, STEP=step,
        num_warps=4, **overlapped(x.device),
    )  # fmt: skip
    return Normed(stream, row, out)


def one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """x [1, depth] times weight [columns, depth] plus bias float32 [columns] -> [1, columns]; sums are float32. Of x
    [n, depth] each row is multiplied by its own n-th of the columns. out: [1, columns], neighbours."""
    columns, depth = weight.shape
    out = x.new_empty((1, columns), dtype=out_dtype) if out is None else out
    step = min(AT_ONCE // 2, triton.next_power_of_2(depth))
    each = min(4, AT_ONCE // step) if columns >= MANY_COLUMNS else 1
    whose = columns // len(x)
    if whose % each:
        each = 1
    _one_row[(triton.cdiv(columns, each),)](
        x, weight, weight if bias is None else bias, out, depth, columns, whose,
        BIAS=bias is not None, COLUMNS=each, STEP=step, WHOLE=depth == step and columns % each == 0, num_warps=4,
        **overlapped(x.device),
    )  # fmt: skip
    return out
