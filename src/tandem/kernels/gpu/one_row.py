"""One row times a matrix: the weights are read once, at the rate of GPU memory, and multiplied in float32.

cuBLAS takes tiles of 64 columns for one row, too few to keep all of a large GPU's memory busy: on an H200 2048 x 5120
took 8.4 us with it and 6.8 us this way, 4096 x 2048 8.7 and 6.1 (bf16).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.overlap import begin, overlapped

MANY_COLUMNS = 1024  # from here on a program takes four of them
FETCH = True
LARGE_ELEMENTS = 1 << 26  # a vocabulary's: enough tiles of cuBLAS's, which read at full rate then


@triton.jit
def _fetch(pointer, nbytes):
    """Asks for contiguous bytes to be brought into L2; one thread of the block does."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [pointer, nbytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _one_row(x, weight, bias, out, depth, columns, BIAS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
             WHOLE: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * COLUMNS
    n, k = first + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    own = weight + first.to(tl.int64) * depth
    if OVERLAP and WHOLE and FETCH:  # while the kernel before runs
        _fetch(own, depth * (COLUMNS * weight.dtype.element_ty.primitive_bitwidth // 8))
    begin(OVERLAP)
    rows = own + tl.arange(0, COLUMNS)[:, None] * depth
    acc = tl.zeros([COLUMNS, STEP], tl.float32)
    for start in range(0, depth, STEP):
        at = start + k
        if WHOLE:
            w, v = tl.load(rows + at[None, :]), tl.load(x + at)
        else:
            w = tl.load(rows + at[None, :], (n < columns)[:, None] & (at < depth)[None, :], other=0.0)
            v = tl.load(x + at, at < depth, other=0.0)
        acc += w.to(tl.float32) * v.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias + n, n < columns, other=0.0)
    tl.store(out + n, y.to(out.dtype.element_ty), n < columns)


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [1, depth] times weight [columns, depth] plus bias float32 [columns] -> [1, columns]; sums are float32."""
    columns, depth = weight.shape
    out = x.new_empty((1, columns), dtype=out_dtype)
    each = 4 if columns >= MANY_COLUMNS else 1
    step = min(1024 if each == 4 else 2048, triton.next_power_of_2(depth))
    whole = depth % step == columns % each == depth % 8 == 0
    _one_row[(triton.cdiv(columns, each),)](
        x, weight, weight if bias is None else bias, out, depth, columns,
        BIAS=bias is not None, COLUMNS=each, STEP=step, WHOLE=whole, FETCH=FETCH, num_warps=4,
        **overlapped(x.device),
    )  # fmt: skip
    return out
