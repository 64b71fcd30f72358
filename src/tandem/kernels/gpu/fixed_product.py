"""`fixed_product`: rows times a matrix, in tiles of one shape for any number of rows.

cuBLAS takes other tiles, and divides sums in other ways, for other numbers of rows. Here a row's sum is added up along
K in one order, by one program, whatever lies beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped

ROWS = 16  # of a tile: the fewest that tensor cores take, so that decoding waits for few rows that are not there
COLUMNS, STEP, STAGES = 32, 128, 4
INTERPRETED = tl.constexpr(
    bool(triton.knobs.runtime.interpret)
)  # where bfloat16 is multiplied as if it were integers


@triton.jit(do_not_specialize=["rows"])
def _product(x, weight, bias, out, rows, depth, columns, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             STEP: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    n, r = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, STEP)
    left, right = x + r[:, None].to(tl.int64) * depth, weight + n[:, None].to(tl.int64) * depth
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, STEP):
        at = start + k
        a = tl.load(left + at[None, :], (r < rows)[:, None] & (at < depth)[None, :], other=0.0)
        b = tl.load(right + at[None, :], (n < columns)[:, None] & (at < depth)[None, :], other=0.0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums = tl.dot(a, tl.trans(b), sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + n, n < columns, other=0.0)[None, :]
    at = out + r[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), (r < rows)[:, None] & (n < columns)[None, :])


def fixed_product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [T, K] times weight [N, K], both of one type, plus bias float32 [N] -> [T, N]; sums are float32."""
    x, (columns, depth) = x.contiguous(), weight.shape
    out = x.new_empty((len(x), columns), dtype=out_dtype)
    if not len(x):  # a step may want no logits
        return out
    _product[(triton.cdiv(columns, COLUMNS), triton.cdiv(len(x), ROWS))](
        x, weight, weight if bias is None else bias, out, len(x), depth, columns, BIAS=bias is not None, ROWS=ROWS,
        COLUMNS=COLUMNS, STEP=STEP, PRECISION="ieee", num_warps=4, num_stages=STAGES,
        **overlapped(x.device),
    )  # fmt: skip
    return out
