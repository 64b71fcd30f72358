"""Dense matrices that stay codes on the GPU, against float64 of the numbers that the codes stand for.

Tolerances: float32 sums of `depth` products in any order differ by at most depth * 2^-23 of the sum of their sizes.
Tiles and unpacked matrices round scaled weights to bfloat16, 2^-9 of each product; Triton's interpreter cuts off, 2^-8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from kernel_cases import DENSE_FORMATS, coded
from tandem import _core
from tandem.errors import KernelError
from tandem.formats.codes import WeightCodes
from tandem.formats.reference import decoded, magnitudes, stored
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import activated
from tandem.spec.activation import Activation, ActivationKind

if AVAILABLE:
    from tandem.kernels.gpu import code_tiles, dense_codes
    from tandem.kernels.gpu.dense_codes import GpuCodes
    from tandem.kernels.gpu.linear import GpuLinear
    from tandem.kernels.gpu.mma import code_mma
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
SHAPES = [(40, 96), (72, 320), (200, 1100)] + ([] if INTERPRETED else [(2080, 2048), (96, 4104)])


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))


def check(got: Tensor, x: Tensor, weight: WeightCodes, bias: Tensor | None, rounded: bool) -> None:
    """float32 results; rounded: scaled weights are."""
    expected = x.double() @ decoded(weight).double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ magnitudes(weight).double().T
    each = (2.0**-8 if INTERPRETED else 2.0**-9) if rounded else 0.0
    assert (
        (got.cpu() - expected).abs() <= (x.shape[1] * 2.0**-23 + each) * size + 2.0**-22 * expected.abs()
    ).all()


def rows_of(count: int, depth: int) -> Tensor:
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is slow")
@pytest.mark.parametrize("fmt", ["fp8", "int4"])
@pytest.mark.parametrize(("columns", "depth"), [(576, 7168), (3072, 1536), (4800, 1536), (1024, 16384)])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_matrices_of_latent_attention(ops: GpuOps, fmt: str, columns: int, depth: int, rows: int) -> None:
    """Rows that are no whole blocks of 128, and the depth of 128 heads' values."""
    weight, x = coded(columns, depth, fmt), rows_of(rows, depth)
    check(ops.linear(weight)(x.to(DEVICE), torch.float32), x, weight, None, rounded=rows > 1)


@pytest.mark.parametrize("fmt", DENSE_FORMATS)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 70])
def test_a_product_is_that_of_the_numbers(ops: GpuOps, fmt: str, columns: int, depth: int, rows: int) -> None:
    if INTERPRETED and rows in (8, 9, 32):
        pytest.skip(
            "Triton's kernels do the same for 2 to 16 rows and from 17 on, and the interpreter is slow"
        )
    weight, x = coded(columns, depth, fmt), rows_of(rows, depth)
    bias = torch.randn(columns).bfloat16() if rows % 2 else None
    linear = ops.linear(weight, bias)
    assert isinstance(linear, GpuCodes)
    check(linear(x.to(DEVICE), torch.float32), x, weight, bias, rounded=rows > 1)
    exact = x.double() @ decoded(weight).double().T + (0 if bias is None else bias.double())
    rounded = linear(x.to(DEVICE)).cpu()
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - exact).norm() < 2.0**-8 * exact.norm() * (3.0 if INTERPRETED else 1.5)


@pytest.mark.skipif(INTERPRETED, reason="there are no other kernels")
@pytest.mark.parametrize("fmt", DENSE_FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_triton_s_kernels_of_few_rows(
    ops: GpuOps, monkeypatch: pytest.MonkeyPatch, fmt: str, rows: int
) -> None:
    """What runs where cuda-core is missing."""
    monkeypatch.setattr(code_mma, "reads", lambda panels, device: False)
    weight, x = coded(72, 320, fmt), rows_of(rows, 320)
    check(ops.linear(weight)(x.to(DEVICE), torch.float32), x, weight, None, rounded=rows > 1)


@pytest.mark.parametrize("fmt", DENSE_FORMATS)
@pytest.mark.parametrize("scratch", [1, 1 << 20])
def test_many_rows_take_the_unpacked_matrix_in_pieces(
    ops: GpuOps, monkeypatch: pytest.MonkeyPatch, fmt: str, scratch: int
) -> None:
    monkeypatch.setattr(code_mma, "MOST_ROWS", 0)
    monkeypatch.setattr(dense_codes, "FEW_ROWS", 4)
    monkeypatch.setattr(dense_codes, "SCRATCH_BYTES", scratch)
    weight, x, bias = coded(72, 320, fmt), rows_of(5, 320), torch.randn(72)
    check(ops.linear(weight, bias)(x.to(DEVICE), torch.float32), x, weight, bias, rounded=True)


@pytest.mark.parametrize("fmt", DENSE_FORMATS)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_unpacked_numbers_are_the_decoded_ones(ops: GpuOps, fmt: str, columns: int, depth: int) -> None:
    weight = coded(columns, depth, fmt)
    linear = ops.linear(weight)
    assert isinstance(linear, GpuCodes)
    got = torch.empty(columns, depth, dtype=torch.bfloat16, device=DEVICE)
    code_tiles.unpack(linear.pool, linear.panels, 0, got)
    expected = decoded(weight)
    if fmt == "nvfp4" or INTERPRETED:  # a scale times its factor is rounded first; or bits are cut off
        assert ((got.cpu() - expected).abs() <= 2.0**-7 * expected.abs()).all()
    else:
        assert torch.equal(got.cpu(), expected.bfloat16())


@pytest.mark.skipif(INTERPRETED, reason="NumPy's products may differ by the number of rows")
@pytest.mark.parametrize("fmt", ["fp8", "int4"])
@pytest.mark.parametrize("columns", [72, 2080, 8192])
def test_a_row_has_the_same_bits_beside_any_others(ops: GpuOps, fmt: str, columns: int) -> None:
    """In steps of up to 32 rows."""
    linear, x = ops.linear(coded(columns, 320, fmt)), rows_of(32, 320).to(DEVICE)
    together = linear(x, torch.float32)
    for first, last in ((0, 1), (0, 2), (3, 8), (8, 9), (7, 16), (15, 32), (3, 20)):
        assert torch.equal(linear(x[first:last], torch.float32), together[first:last])


KINDS = [kind for kind in get_args(ActivationKind) if kind != "relu2"]


@pytest.mark.skipif(INTERPRETED, reason="no CUDA kernels there")
@pytest.mark.parametrize("fmt", [fmt for fmt in DENSE_FORMATS if fmt != "nvfp4"])
@pytest.mark.parametrize(("width", "depth"), [(48, 96), (512, 2048), (2832, 320)])
@pytest.mark.parametrize("rows", [1, 9, 16, 32])
def test_gate_and_up_end_in_the_activation(ops: GpuOps, fmt: str, width: int, depth: int, rows: int) -> None:
    """Of the exact products, rounded once to bfloat16. An error of gate changes the result at most 1.2 times up and
    one, that of up at most gate: so steep are the activations."""
    how = Activation(KINDS[(DENSE_FORMATS.index(fmt) + width // 16) % len(KINDS)], 1.702, 0.7)
    weight, x = coded(2 * width, depth, fmt), rows_of(rows, depth)
    linear = ops.linear(weight)
    got = linear.activated(x.to(DEVICE), how)
    assert got is not None and got.dtype == torch.bfloat16
    exact, size = (x.double() @ decoded(weight).double().T), x.double().abs() @ magnitudes(weight).double().T
    (gate, up), errors = exact.chunk(2, 1), (size * (depth * 2.0**-23)).chunk(2, 1)
    expected = activated(how, gate, up)
    within = errors[0] * 1.2 * (up.abs() + 1) + errors[1] * (gate.abs() + 1) + 2.0**-8 * expected.abs() + 1e-7
    assert ((got.cpu().double() - expected).abs() <= within).all()
    for first, last in ((0, 1), (rows // 2, rows)):
        assert torch.equal(linear.activated(x[first:last].to(DEVICE), how), got[first:last])


@pytest.mark.skipif(INTERPRETED, reason="no CUDA kernels there")
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_a_dense_mlp_of_codes_is_that_of_its_numbers(ops: GpuOps, rows: int) -> None:
    """Ends in the activation, or not: width 40 has panels of gate and up together. Captured, too."""
    x = rows_of(rows, 256).to(DEVICE)
    for width in (40, 64):
        matrices = coded(width, 256, "fp8"), coded(width, 256, "fp8"), coded(256, width, "fp8")
        plain, codes = ops.mlp(256, width), ops.mlp(256, width)
        plain.load(*map(decoded, matrices))
        codes.load(*matrices)
        expected, got = plain(x), codes(x)
        assert (got.float() - expected.float()).norm() < 2.0**-7 * expected.float().norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = codes(x)
        graph.replay()
        assert torch.equal(again, got)


@pytest.mark.parametrize("rows", [0, 1, 3, 20])
def test_results_are_written_into_columns_of_others(ops: GpuOps, rows: int) -> None:
    weight, x = coded(40, 96, "fp8"), rows_of(rows, 96).to(DEVICE)
    linear, whole = ops.linear(weight), torch.zeros(rows, 100, device=DEVICE)
    assert linear(x, out=whole[:, 50:90]).data_ptr() == whole[:, 50:].data_ptr()
    assert torch.equal(whole[:, 50:90], linear(x, torch.float32))
    assert whole[:, :50].eq(0).all() and whole[:, 90:].eq(0).all()


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_no_number_stays_none(ops: GpuOps, rows: int) -> None:
    """A block's NaN scale reaches its own columns, a row's NaN its own results."""
    weight, x = coded(40, 96, "fp8 rows"), rows_of(rows, 96)
    scales = torch.where(torch.arange(40)[:, None] == 3, torch.nan, weight.scales)
    weight = replace(weight, scales=scales)
    got = ops.linear(weight)(x.to(DEVICE)).cpu()
    assert got[:, 3].isnan().all() and got[:, [*range(3), *range(4, 40)]].isfinite().all()
    x[-1, 7] = torch.nan
    got = ops.linear(coded(40, 96, "fp8"))(x.to(DEVICE)).cpu()
    assert got[-1].isnan().all() and got[:-1].isfinite().all()


@pytest.mark.parametrize("fmt", ["int4_zeros", "int6"])
def test_codes_without_kernels_become_numbers(ops: GpuOps, fmt: str) -> None:
    weight = stored(torch.randn(40, 96), fmt, 32)
    assert not ops.reads(weight) and ops.cpu.reads(weight)
    linear = ops.linear(weight)
    assert isinstance(linear, GpuLinear) and linear.weight.dtype == torch.bfloat16
    odd = stored(torch.randn(40, 95), "fp8", 128)
    assert not ops.reads(odd) and isinstance(ops.linear(odd), GpuLinear)


def test_other_activations_are_refused(ops: GpuOps) -> None:
    with pytest.raises(KernelError, match="bfloat16, not torch.float32"):
        ops.linear(coded(40, 96, "fp8"))(torch.zeros(1, 96, device=DEVICE))


@pytest.mark.skipif(INTERPRETED, reason="no CUDA kernels there")
@pytest.mark.parametrize("fmt", ["fp8", "int8", "int4", "mxfp4"])
def test_products_of_few_rows_are_captured_in_graphs(ops: GpuOps, fmt: str) -> None:
    linear, x = ops.linear(coded(72, 320, fmt)), rows_of(3, 320).to(DEVICE)
    graph, expected = torch.cuda.CUDAGraph(), linear(x)
    with torch.cuda.graph(graph):
        got = linear(x)
    graph.replay()
    assert torch.equal(got, expected)
    x.mul_(2.0)
    graph.replay()
    assert torch.equal(got, linear(x)) and torch.equal(got, 2 * expected)
