"""`Linear` on the GPU: matrices of PyTorch (cuBLAS), a kernel of ours for one row, and one for any number of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import KernelError
from tandem.kernels.gpu.fixed_product import fixed_product
from tandem.kernels.gpu.one_row import LARGE_ELEMENTS, after_norm, one_row, takes_norm
from tandem.kernels.joined import Normed, Sum

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class GpuLinear:
    """Weights kept as bfloat16 or float32 in GPU memory; float32 ones multiply in full float32."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, fmt: str, device: torch.device, fixed: bool = False
    ) -> None:
        """fixed: a row has the same bits beside any others."""
        if fmt not in DTYPES:
            raise KernelError(f"dense matrices on the GPU are {' or '.join(DTYPES)}, not {fmt}")
        # `to` would keep the strides of a transposed matrix, which `one_row` does not know. What is on the GPU already
        # was brought there for this matrix.
        self.weight = weight.detach().to(device, DTYPES[fmt], copy=not weight.is_cuda).contiguous()
        self.bias = None if bias is None else bias.detach().to(device, torch.float32, copy=True)
        self.out_features, self.in_features = weight.shape
        self.fixed = fixed
        self._bias = None if self.bias is None else self.bias.to(self.weight.dtype)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        kind = (out_dtype or x.dtype) if out is None else out.dtype
        small = len(x) == 1 and self.weight.numel() < LARGE_ELEMENTS
        if small and not self.fixed and (out is None or out.stride(1) == 1):
            return one_row(x.contiguous(), self.weight, self.bias, kind, out)
        y = self._times(x, kind)
        return y if out is None else out.copy_(y)

    def after_norm(self, s: Sum) -> Normed | None:
        """As `AfterNorm`: one row."""
        if self.fixed or self.weight.numel() >= LARGE_ELEMENTS or not takes_norm(s, self.weight):
            return None
        return after_norm(s, self.weight, self.bias)

    def _times(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        if self.fixed:
            return fixed_product(x.to(self.weight.dtype), self.weight, self.bias, out_dtype)
        return multiplied(x, self.weight, self.bias, out_dtype, self._bias)


def multiplied(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, rounded_bias: Tensor | None = None
) -> Tensor:
    """x [T, K] times weight [N, K] plus bias float32 [N]; rounded_bias: that in the weight's type, if any."""
    if x.dtype == out_dtype == weight.dtype and (bias is None or rounded_bias is not None):
        return F.linear(x, weight, rounded_bias)
    if x.dtype == weight.dtype and x.is_cuda:  # float32 sums of bfloat16 products, not rounded
        y = torch.mm(x, weight.T, out_dtype=torch.float32)
        return (y if bias is None else y + bias).to(out_dtype)
    return F.linear(x.float(), weight.float(), bias).to(out_dtype)


def dtype_of(fmt: str) -> torch.dtype:
    """Type of matrices of heads. Raises KernelError where there are no kernels."""
    if fmt not in DTYPES:
        raise KernelError(f"matrices of heads on the GPU are {' or '.join(DTYPES)}, not {fmt}")
    return DTYPES[fmt]
