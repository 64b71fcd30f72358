"""Residual addition and RMS norm in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.overlap import begin, overlapped


@triton.jit
def _rms_norm(
    x, residual, weight, out, n, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * n
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    value = tl.load(x + row + columns, inside, other=0.0)
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x [T, n]; with `residual`: residual += x in place, then its norm."""
    x = x.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(n)
    rest = x if residual is None else residual
    warps = min(16, max(1, block // 256))
    _rms_norm[(x.numel() // n,)](
        x,
        rest,
        weight,
        out,
        n,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=warps,
        **overlapped(x.device),
    )
    return out
