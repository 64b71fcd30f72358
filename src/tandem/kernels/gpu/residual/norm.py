"""Residual addition and RMS norm in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.overlap import begin, overlapped
from tandem.kernels.ops import Addend


@triton.jit
def _rms_norm(
    x, residual, beside, gate, weight, out, n, gate_row, eps, ADD: tl.constexpr, BESIDE: tl.constexpr,
    GATED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """With BESIDE x is a sum of two first, rounded as `Ops.gated` rounds it."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * n
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    value = tl.load(x + row + columns, inside, other=0.0)
    if BESIDE:
        kind: tl.constexpr = x.dtype.element_ty
        more = tl.load(beside + row + columns, inside, other=0.0).to(tl.float32)
        if GATED:
            share = tl.sigmoid(tl.load(gate + tl.program_id(0).to(tl.int64) * gate_row).to(tl.float32))
            more *= share.to(kind).to(tl.float32)
        value = (value.to(tl.float32) + more.to(kind).to(tl.float32)).to(kind)
    if ADD:
        before = tl.load(residual + row + columns, inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(residual + row + columns, value, inside)
    y = value.to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y) / n + eps)
    if weight.dtype.element_ty != tl.float32:
        y = y.to(out.dtype.element_ty).to(tl.float32)
    y *= tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, y.to(out.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, beside: Addend | None = None
) -> Tensor:
    """x [T, n]; with `residual`: residual += x in place, then its norm. beside: is added to x first."""
    x = x.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(n)
    rest = x if residual is None else residual
    warps = min(16, max(1, block // 256))
    more, gate = (x, None) if beside is None else beside
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
        BESIDE=beside is not None,
        GATED=gate is not None,
        BLOCK=block,
        num_warps=warps,
        **overlapped(x.device),
    )
    return out
