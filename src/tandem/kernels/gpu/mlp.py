"""`GpuMLP`: a dense MLP as two matrices with one kernel between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.formats.codes import Blocks, Weight
from tandem.formats.cut import numbers, stacked
from tandem.kernels.ops import Linear, SureRead

SCRATCH_BYTES = 512 << 20  # of what lies between the matrices, at a time
ALIGNED_ROWS = 64


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, inside, other=0.0)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), inside)


def silu_mul(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [T, 2 width], gates first -> silu(gate) * up, [T, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width), dtype=dtype)
    _silu_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out


class GpuMLP:
    """`MLP` on a GPU. Rounding points are those of an expert: the product of gate and up, and the result."""

    packed = None  # nothing that a packed cache could keep

    def __init__(self, linear: Callable[[Weight | Blocks], Linear]) -> None:
        """linear: makes the matrices."""
        self._linear = linear
        self._gate_up: Linear
        self._down: Linear

    def load(self, gate: Weight, up: Weight, down: Weight) -> None:
        """Where gate and up are stored in different ways, they become numbers."""
        both = stacked((gate, up))
        self._gate_up = self._linear((numbers(gate), numbers(up)) if both is None else both)
        self._down = self._linear(down)

    def reads(self) -> list[SureRead]:
        return [SureRead(self._gate_up), SureRead(self._down)]

    def __call__(self, x: Tensor) -> Tensor:
        """A long step is taken in pieces, so that its memory is bounded."""
        per_row = self._gate_up.out_features * 4 + self._down.in_features * x.element_size()
        each = max(1, SCRATCH_BYTES // per_row // ALIGNED_ROWS) * ALIGNED_ROWS
        if len(x) <= each:
            return self._down(self._between(x))
        out = torch.empty_like(x)
        for part, result in zip(x.split(each), out.split(each), strict=True):
            self._down(self._between(part), out=result)
        return out

    def _between(self, x: Tensor) -> Tensor:
        return silu_mul(self._gate_up(x, torch.float32), x.dtype)
