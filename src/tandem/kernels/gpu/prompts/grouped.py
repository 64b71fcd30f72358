"""`grouped_product`: each row times the matrix of its expert, on GPUs where PyTorch's would ask for numbers of rows.

A program has a tile of one expert's rows and of its columns. Only the GPU knows how many tiles each expert has. So as
many programs are started as there may be, and those beyond do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS, MANY_ROWS = 64, 128  # of a tile
EXPERTS = 128  # that a program looks through, or a power of two above: so few kernels are compiled
COLUMNS, DEPTH, STAGES = 128, 64, 3  # with many rows 96 KiB of shared memory, which every card since 8.0 has


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["ends"])
def _grouped(x, matrices, ends, out, experts, n, k, stride, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    tile, e = tl.program_id(1), tl.arange(0, EXPERTS)
    end = tl.load(ends + e, e < experts, other=0)
    begin = tl.load(ends + e - 1, (e > 0) & (e < experts), other=0)
    tiles = tl.where(e < experts, (end - begin + ROWS - 1) // ROWS, 0)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    first = tl.sum(tl.where(e == expert, begin + (tile - after + tiles) * ROWS, 0), 0)
    row, last = (first + tl.arange(0, ROWS)).to(tl.int64), tl.sum(tl.where(e == expert, end, 0), 0)
    column, inner = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    left = x + row[:, None] * stride + inner[None, :]
    right = matrices + expert.to(tl.int64) * n * k + column[None, :].to(tl.int64) * k + inner[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        inside = start + inner < k
        a = tl.load(left + start, (row < last)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + start, (column < n)[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums)
    at = out + row[:, None] * n + column[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), (row < last)[:, None] & (column < n)[None, :])


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor, mean_rows: float) -> Tensor:
    """bfloat16 [R, N]: row r of x [R, K] times the transpose of its expert's [N, K]; nothing is written to rows of
    nobody.

    x: rows may lie apart. matrices [E, N, K], contiguous; ends int32 [E]: the row behind each expert's last. mean_rows:
    of an expert, about.
    """
    experts, n, k = matrices.shape
    rows = MANY_ROWS if mean_rows > FEW_ROWS else FEW_ROWS
    out = x.new_empty(len(x), n)
    grid = triton.cdiv(n, COLUMNS), len(x) // rows + experts
    _grouped[grid](
        x, matrices, ends, out, experts, n, k, x.stride(0), EXPERTS=max(EXPERTS, triton.next_power_of_2(experts)),
        ROWS=rows, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=8 if rows == MANY_ROWS else 4, num_stages=STAGES,
    )  # fmt: skip
    return out
