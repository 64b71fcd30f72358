"""A row's sum and norm inside the product behind it, against the kernels that make them one after the other.

The sum has the same bits. The norm adds up squares in another order, depth * 2^-24 of their sum, so a number may round
to its neighbour. The product is then that of the norm that was made.
"""

from __future__ import annotations

import pytest
import torch

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from tandem.kernels.joined import Sum
from tandem.kernels.ops import Addend

if AVAILABLE:
    from tandem.kernels.gpu.linear import GpuLinear
    from tandem.kernels.gpu.norm import rms_norm

pytestmark = [pytest.mark.gpu, needs_triton]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
SHAPES = [(40, 96), (513, 320)] + ([] if INTERPRETED else [(513, 2048), (1040, 4096)])
BESIDE = ["nothing", "a result", "a gated result"]


def sum_of(depth: int, beside: str, wide: bool) -> Sum:
    generator = torch.Generator().manual_seed(2)
    sizes = depth, depth, depth, 1
    x, residual, more, gate = (torch.randn(1, n, generator=generator).to(DEVICE, DTYPE) for n in sizes)
    weight = (torch.rand(depth, generator=generator) + 0.5).to(DEVICE, torch.float32 if wide else DTYPE)
    added = None if beside == "nothing" else Addend(more, gate if beside == "a gated result" else None)
    return Sum(x, residual, weight, 1e-6, added)


def check(matrix: GpuLinear, s: Sum) -> None:
    before = s.residual.clone()
    made = matrix.after_norm(s)
    assert made is not None and torch.equal(s.residual, before)
    x = rms_norm(s.x, s.weight, s.eps, before, s.addend)
    assert torch.equal(made.residual, before)
    assert ((made.x - x).abs() <= (2.0**-20 if INTERPRETED else 2.0**-7) * x.abs()).all()
    product = matrix(made.x)
    assert ((made.product - product).abs() <= 2.0**-7 * product.abs().max()).all()


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_numbers_begin_with_the_norm(columns: int, depth: int, wide: bool, beside: str) -> None:
    weight = torch.randn(columns, depth, generator=torch.Generator().manual_seed(1)) / depth**0.5
    matrix = GpuLinear(weight.to(DTYPE), None, "f32" if INTERPRETED else "bf16", DEVICE)
    check(matrix, sum_of(depth, beside, wide))


def test_other_rows_are_normed_before() -> None:
    matrix, s = GpuLinear(torch.zeros(8, 16), None, "f32", DEVICE), sum_of(16, "nothing", wide=True)
    several = s._replace(x=s.x.expand(2, -1), residual=s.residual.expand(2, -1))
    assert matrix.after_norm(several) is None
    fixed = GpuLinear(torch.zeros(8, 16), None, "f32", DEVICE, fixed=True)
    assert fixed.after_norm(s) is None
