"""`GpuMLP`: a dense MLP as two matrices with one kernel between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, get_args, runtime_checkable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.formats.codes import Blocks, Weight
from tandem.formats.cut import numbers, stacked
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.ops import Linear, SureRead
from tandem.spec.activation import SILU, Activation, ActivationKind
from tandem.spec.gpu_scratch import MLP_BYTES

KINDS = {name: kind for kind, name in enumerate(get_args(ActivationKind))}  # what KIND says
ALIGNED_ROWS = 64


def activation_constants(how: Activation) -> dict[str, float]:
    """Constants of every kernel that ends in `activated`."""
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
    """Activation of the kinds with a gate, in the order of `ActivationKind`; float32."""
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
              BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, inside, other=0.0)
    y = activated(gate, up, KIND, ALPHA, LIMIT)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), inside)


@triton.jit
def _activate_all(x, out, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = relu2(tl.load(x + row * width + column, column < width, other=0.0))
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), column < width)


def activate(how: Activation, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [T, 2 width], gates first; or without gates [T, width] -> [T, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // (2 if how.gated else 1)
    out = gate_up.new_empty((rows, width), dtype=dtype)
    grid, shared = (rows, triton.cdiv(width, 1024)), {"BLOCK": 1024, **overlapped(gate_up.device)}
    if how.gated:
        _activate[grid](gate_up, out, width, **activation_constants(how), **shared, num_warps=4)
    else:
        _activate_all[grid](gate_up, out, width, **shared, num_warps=4)
    return out


@triton.jit
def _gated(x, gate, out, width, gate_row, gate_head, head, BLOCK: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    """GATE: 0: none, 1: of a row, 2: of each of its numbers, 3: of each of its heads."""
    begin(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < width, gate + row * gate_row
    kind = out.dtype.element_ty
    y = tl.load(x + row * width + column, inside, other=0.0).to(tl.float32)
    if GATE == 1:
        y *= tl.sigmoid(tl.load(at).to(tl.float32)).to(kind).to(tl.float32)
    if GATE >= 2:
        own = tl.load(at + column // head * gate_head + (column % head if GATE == 2 else 0), inside, other=0.0)
        y *= tl.sigmoid(own.to(tl.float32)).to(kind).to(tl.float32)
    if ADD:
        y = tl.load(out + row * width + column, inside, other=0.0).to(tl.float32) + y.to(kind).to(tl.float32)
    tl.store(out + row * width + column, y.to(kind), inside)


def gated(x: Tensor, gate: Tensor | None, out: Tensor | None) -> Tensor:
    """As `Ops.gated`."""
    x, width = x.contiguous(), x.shape[1]
    to, by = torch.empty_like(x) if out is None else out, x if gate is None else gate
    each = by.dim() == 3
    kind = 0 if gate is None else 1 if not each else 3 if by.shape[2] == 1 else 2
    _gated[(len(x), triton.cdiv(width, 1024))](
        x, by, to, width, by.stride(0), by.stride(1) if each else 0, width // by.shape[1] if each else width,
        BLOCK=1024, GATE=kind, ADD=out is not None, num_warps=4,
        **overlapped(x.device),
    )  # fmt: skip
    return to


@runtime_checkable
class Activating(Protocol):
    """A matrix of gate and up whose product can end in the activation."""

    def prepare(self, how: Activation) -> None:
        """Before the first `activated`: a step may be captured."""
        ...

    def activated(self, x: Tensor, how: Activation, ready: bool = False) -> Tensor | None:
        """x [T, K] -> [T, width] in x's type; None where the product has to come first. ready: x was there before the
        kernel before let the next start (`overlap.py`)."""
        ...


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
        gate_up = stacked((gate, up))
        self._gate_up = self._linear((numbers(gate), numbers(up)) if gate_up is None else gate_up)
        self._down = self._linear(down)
        if isinstance(self._gate_up, Activating):
            self._gate_up.prepare(self._activation)

    def reads(self) -> list[SureRead]:
        return [SureRead(self._gate_up), SureRead(self._down)]

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """As `EarlyDense`."""
        gate_up = self._gate_up
        activations = gate_up.activated(x, self._activation, True) if isinstance(gate_up, Activating) else None
        return partial(self, x) if activations is None else partial(self._down, activations)

    def __call__(self, x: Tensor) -> Tensor:
        """A long step is taken in pieces, so that its memory is bounded."""
        per_row = self._gate_up.out_features * 4 + self._down.in_features * x.element_size()
        each = max(1, MLP_BYTES // per_row // ALIGNED_ROWS) * ALIGNED_ROWS
        if len(x) <= each:
            return self._down(self._between(x))
        out = torch.empty_like(x)
        for part, out_part in zip(x.split(each), out.split(each), strict=True):
            self._down(self._between(part), out=out_part)
        return out

    def _between(self, x: Tensor) -> Tensor:
        if isinstance(self._gate_up, Activating):
            activations = self._gate_up.activated(x, self._activation)
            if activations is not None:
                return activations
        return activate(self._activation, self._gate_up(x, torch.float32), x.dtype)
