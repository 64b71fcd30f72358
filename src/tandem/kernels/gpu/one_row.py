"""One row times a matrix: the weights are read once, at the rate of GPU memory, and multiplied in float32.

cuBLAS takes tiles of 64 columns for one row, too few to keep all of a large GPU's memory busy: on an H200 2048 x 5120
took 8.4 us with it and 6.8 us this way, 4096 x 2048 8.7 and 6.1 (bf16).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY_COLUMNS = 1024  # from here on a program takes four of them
LARGE_ELEMENTS = 1 << 26  # a vocabulary's: enough tiles of cuBLAS's, which read at full rate then


@triton.jit
def _one_row(
    x, weight, bias, out, depth, columns, BIAS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    n, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    rows = weight + n[:, None].to(tl.int64) * depth
    real = (n < columns)[:, None]
    acc = tl.zeros([COLUMNS, STEP], tl.float32)
    for start in range(0, depth, STEP):
        at = start + k
        w = tl.load(rows + at[None, :], real & (at < depth)[None, :], other=0.0).to(tl.float32)
        acc += w * tl.load(x + at, at < depth, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias + n, n < columns, other=0.0)
    tl.store(out + n, y.to(out.dtype.element_ty), n < columns)


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [1, depth] times weight [columns, depth] plus bias float32 [columns] -> [1, columns]; sums are float32."""
    columns, depth = weight.shape
    out = x.new_empty((1, columns), dtype=out_dtype)
    each = 4 if columns >= MANY_COLUMNS else 1
    _one_row[(triton.cdiv(columns, each),)](
        x, weight, weight if bias is None else bias, out, depth, columns,
        BIAS=bias is not None, COLUMNS=each, STEP=min(1024 if each == 4 else 2048, triton.next_power_of_2(depth)),
        num_warps=4,
    )  # fmt: skip
    return out
