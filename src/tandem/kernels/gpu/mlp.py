"""`GpuMLP`: a dense MLP as two matrices with one kernel between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.config.layers import SILU, Activation, ActivationKind
from tandem.formats.codes import Blocks, Weight
from tandem.formats.cut import numbers, stacked
from tandem.kernels.gpu.overlap import begin, overlapped
from tandem.kernels.ops import Linear, SureRead

KINDS = {name: kind for kind, name in enumerate(get_args(ActivationKind))}  # what KIND says
SCRATCH_BYTES = 512 << 20  # of what lies between the matrices, at a time
ALIGNED_ROWS = 64


def activation_constants(how: Activation) -> dict[str, float]:
    """What every kernel that ends in `activated` is compiled with."""
    return {"KIND": KINDS[how.kind], "ALPHA": how.alpha, "LIMIT": how.limit}


@triton.jit
def _at_most(x, limit):
    """NaN stays NaN, which tl.minimum would drop."""
    return tl.where(x > limit, limit, x)


@triton.jit
def relu2(x):
    x = tl.where(x < 0, 0.0, x)
    return x * x


@triton.jit
def activated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Of kinds with a gate, in the order of `ActivationKind`; float32."""
    if KIND >= 3:
        up = -_at_most(-_at_most(up, LIMIT), LIMIT)
    if KIND == 0:
        y = gate * tl.sigmoid(gate) * up
    elif KIND == 1:
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == 2:
        y = gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)) * up
    elif KIND == 5:
        y = _at_most(gate * tl.sigmoid(gate), LIMIT) * up
    else:
        gate = _at_most(gate, LIMIT)
        if KIND == 4:
            y = gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
        else:
            y = gate * tl.sigmoid(gate) * up
    return y


@triton.jit
def _activate(gate_up, out, width, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, inside, other=0.0)
    y = activated(gate, up, KIND, ALPHA, LIMIT)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), inside)


@triton.jit
def _activate_all(x, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = relu2(tl.load(x + row * width + column, column < width, other=0.0))
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), column < width)


def activate(how: Activation, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [T, 2 width], gates first; or without gates [T, width] -> [T, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // (2 if how.gated else 1)
    out = gate_up.new_empty((rows, width), dtype=dtype)
    grid = rows, triton.cdiv(width, 1024)
    if how.gated:
        constants = activation_constants(how)
        _activate[grid](gate_up, out, width, **constants, BLOCK=1024, num_warps=4)
    else:
        _activate_all[grid](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _gated(x, gate, out, width, gate_row, gate_head, head, BLOCK: tl.constexpr, ALONE: tl.constexpr, ADD: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < width, gate + row * gate_row
    if not ALONE:
        at += column // head * gate_head + column % head
    kind = out.dtype.element_ty
    weight = tl.sigmoid(tl.load(at).to(tl.float32) if ALONE else tl.load(at, inside, other=0.0).to(tl.float32))
    y = tl.load(x + row * width + column, inside, other=0.0).to(tl.float32) * weight.to(kind).to(tl.float32)
    if ADD:
        y = tl.load(out + row * width + column, inside, other=0.0).to(tl.float32) + y.to(kind).to(tl.float32)
    tl.store(out + row * width + column, y.to(kind), inside)


def gated(x: Tensor, gate: Tensor, out: Tensor | None) -> Tensor:
    """As `Ops.gated`."""
    x, width, alone = x.contiguous(), x.shape[1], gate.dim() == 2
    to = torch.empty_like(x) if out is None else out
    _gated[(len(x), triton.cdiv(width, 1024))](
        x, gate, to, width, gate.stride(0), 0 if alone else gate.stride(1), width if alone else gate.shape[2],
        BLOCK=1024, ALONE=alone, ADD=out is not None, num_warps=4, **overlapped(x.device),
    )  # fmt: skip
    return to


class GpuMLP:
    """`MLP` on a GPU. Rounding points are those of an expert: the product of gate and up, and the result."""

    packed = None  # nothing that a packed cache could keep

    def __init__(self, linear: Callable[[Weight | Blocks], Linear], activation: Activation = SILU) -> None:
        """linear: makes the matrices."""
        self._linear, self._activation = linear, activation
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
        return activate(self._activation, self._gate_up(x, torch.float32), x.dtype)
