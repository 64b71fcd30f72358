"""Residual addition and RMS norm in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.ops import Addend


@triton.jit
def joined(value, addend, gate, residual, columns, inside, kind: tl.constexpr, ADDEND: tl.constexpr,
           GATED: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """value, with BESIDE a sum of two rounded as `Ops.gated` rounds it, and with ADD the residual with that."""
    if ADDEND:
        more = tl.load(addend + columns, inside, other=0.0).to(tl.float32)
        if GATED:
            more *= tl.sigmoid(tl.load(gate).to(tl.float32)).to(kind).to(tl.float32)
        value = (value.to(tl.float32) + more.to(kind).to(tl.float32)).to(kind)
    if ADD:
        before = tl.load(residual + columns, inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
    return value


@triton.jit
def normed(value, weight, n, eps, kind: tl.constexpr):
    """value and weight as they are stored."""
    y = value.to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y) / n + eps)
    if weight.dtype != tl.float32:
        y = y.to(kind).to(tl.float32)
    return (y * weight.to(tl.float32)).to(kind)


@triton.jit
def _rms_norm(
    x, residual, addend, gate, weight, out, n, gate_row, eps, ADD: tl.constexpr, ADDEND: tl.constexpr,
    GATED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * n
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    value = tl.load(x + row + columns, inside, other=0.0)
    at = gate + tl.program_id(0).to(tl.int64) * gate_row
    value = joined(value, addend + row, at, residual + row, columns, inside, x.dtype.element_ty, ADDEND, GATED, ADD)
    if ADD:
        tl.store(residual + row + columns, value, inside)
    by = tl.load(weight + columns, inside, other=0.0)
    tl.store(out + row + columns, normed(value, by, n, eps, out.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, addend: Addend | None = None
) -> Tensor:
    """x [T, n]; with `residual`: residual += x in place, then its norm. addend: is added to x first."""
    x = x.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(n)
    rest = x if residual is None else residual
    warps = min(16, max(1, block // 256))
    more, gate = (x, None) if addend is None else addend
    _rms_norm[(x.numel() // n,)](
        x,
        rest,
        more.contiguous(),
        x if gate is None else gate,
        weight,
        out,
        n,
        0 if gate is None else gate.stride(0),
        eps,
        ADD=residual is not None,
        ADDEND=addend is not None,
        GATED=gate is not None,
        BLOCK=block,
        num_warps=warps,
        **overlapped(x.device),
    )
    return out
