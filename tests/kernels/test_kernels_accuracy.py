"""Every format x tier x algorithm x odd size against float64 of the weights that the codes stand for."""

from __future__ import annotations

import pytest
import torch

import kernel_cases as cases
from tandem import _core
from tandem.errors import KernelError
from tandem.formats.reference import dequantised
from tandem.kernels.cpu import PackedMatrix
from tandem.kernels.fit import as_packed

SHAPES = [(1, 1), (16, 32), (33, 65), (75, 333), (40, 1100)]  # [N, K]: not multiples of panel, group or slice
ROWS = [1, 2, 3, 17, 40, 57, 129]

matrix_of_tests = pytest.mark.parametrize(
    ("fmt", "group", "tier", "algorithm"),
    cases.pairwise(cases.FORMATS, cases.TIERS, cases.ALGORITHMS),
)


def random_weight(rows: int, depth: int) -> torch.Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows * 4099 + depth))


@matrix_of_tests
def test_product_matches_float64(fmt: str, group: int, tier: str, algorithm: str) -> None:
    cases.require_tier(tier)
    workspace = cases.workspace_of(tier, algorithm)
    for n, k in SHAPES:
        weight, bias = random_weight(n, k), torch.linspace(-1, 1, n)
        matrix = cases.packed_matrix(workspace, weight, bias, fmt, group)
        assert matrix.tier == tier
        assert (workspace.tile_from_rows(cases.CODE_TYPES.get(fmt, fmt)) == 0) == (algorithm == "tile_mm")
        exact = as_packed(weight, fmt, group).double()
        size = cases.magnitude_of(weight, fmt, group).double()
        for rows in ROWS:
            x = cases.activations(rows, k, fmt)
            expected = x.double() @ exact.T + bias.double()
            magnitude = x.double().abs() @ size.T + bias.double().abs()
            error = (matrix(x, torch.float32).double() - expected).abs()
            assert (error <= cases.product_bound(magnitude, k, fmt, group, tier)).all(), (n, k, rows)


@pytest.mark.parametrize("tier", ["amx", "amx_standin"])
@pytest.mark.parametrize(
    ("fmt", "group"),
    [("int4", 32), ("int4", 64), ("int4", 128), ("int4_zeros", 32), ("mxfp4", 32), ("nvfp4", 16)],
)
def test_few_rows_of_4_bit_codes_are_not_rounded_on_tiles(fmt: str, group: int, tier: str) -> None:
    """Sums of a group's products, then of the groups, in float32; many rows take scaled weights rounded to bfloat16."""
    cases.require_tier(tier)
    n, k = 80, 768
    weight = random_weight(n, k)
    matrix = cases.packed_matrix(cases.workspace_of(tier, "tile_mm"), weight, None, fmt, group)
    exact, size = (f(weight, fmt, group).double().T for f in (as_packed, cases.magnitude_of))
    exactly = fmt in ("mxfp4", "nvfp4")  # a code times a scale is a bf16 number
    for rows, close in ((1, True), (5, True), (16, True), (32, exactly or group == 128), (40, exactly)):
        x = cases.activations(rows, k, fmt)
        error = (matrix(x, torch.float32).double() - x.double() @ exact).abs()
        bound = 2 * (group + k // group + 4) * cases.F32_UNIT * (x.double().abs() @ size)
        assert (error <= bound).all() == close, rows


@pytest.mark.parametrize("tier", ["avx2", "avx512", "avx512_bf16", "amx", "amx_standin"])
@pytest.mark.parametrize(
    ("fmt", "group"), [("bf16", 0), ("int4", 32), ("int4_zeros", 256), ("int8", 0), ("fp8", 128)]
)
def test_many_rows_over_several_slices_blocks_and_panels(fmt: str, group: int, tier: str) -> None:
    """More rows than one call takes, three pairs of panels per task, K of several slices with a shorter last one; tiles
    of 11 to 16 rows, some of them not full; blocks of one tile and of two."""
    cases.require_tier(tier)
    n, k = 32 * 24, 1150
    weight = random_weight(n, k)
    matrix = cases.packed_matrix(cases.workspace_of(tier, "tile_mm"), weight, None, fmt, group)
    exact, size = (f(weight, fmt, group).double().T for f in (as_packed, cases.magnitude_of))
    for rows in (33, 47, 64, 65, 66, 80, 81, 160, 161, 530):
        x = cases.activations(rows, k, fmt)
        bound = cases.product_bound(x.double().abs() @ size, k, fmt, group, tier)
        assert ((matrix(x, torch.float32).double() - x.double() @ exact).abs() <= bound).all(), rows


@pytest.mark.parametrize("tier", ["amx", "amx_standin"])
@pytest.mark.parametrize("k", [7264, 7296, 9216])
def test_rows_too_long_for_a_stream(k: int, tier: str) -> None:
    """32 rows of more than 7936 k, 64 of more than 9088 and 80 of more than 7264 do not fit its scratch."""
    cases.require_tier(tier)
    weight = random_weight(40, k)
    matrix = cases.packed_matrix(cases.workspace_of(tier, "tile_mm"), weight, None, "int8", 32)
    exact, size = (f(weight, "int8", 32).double().T for f in (as_packed, cases.magnitude_of))
    for rows in (32, 33, 64, 80):
        x = cases.activations(rows, k, "int8")
        bound = cases.product_bound(x.double().abs() @ size, k, "int8", 32, tier)
        assert ((matrix(x, torch.float32).double() - x.double() @ exact).abs() <= bound).all(), rows


@pytest.mark.parametrize("tier", ["amx", "amx_standin"])
@pytest.mark.parametrize(
    ("fmt", "group"),
    [("int4", 128), ("int8", 128), ("fp8", 128), ("int4_zeros", 128)],
)
def test_few_rows_on_tiles_round_no_weight(fmt: str, group: int, tier: str) -> None:
    """Groups of 128, one and two tiles of rows, an odd number of groups: sums are scaled instead of weights, so the
    error is that of tiers without tiles."""
    cases.require_tier(tier)
    n, k = 75, 4460
    weight = random_weight(n, k)
    matrix = cases.packed_matrix(cases.workspace_of(tier, "tile_mm"), weight, None, fmt, group)
    exact, size = (f(weight, fmt, group).double().T for f in (as_packed, cases.magnitude_of))
    for rows in (4, 16, 17, 31, 32):
        x = cases.activations(rows, k, fmt)
        bound = cases.product_bound(x.double().abs() @ size, k, fmt, group, "scalar")
        assert ((matrix(x, torch.float32).double() - x.double() @ exact).abs() <= bound).all(), rows


@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize(("fmt", "group"), cases.FORMATS)
def test_codes_equal_the_reference_bit_for_bit(fmt: str, group: int, tier: str) -> None:
    cases.require_tier(tier)
    for n, k in SHAPES:
        weight = random_weight(n, k)
        weight[0] = 0  # a group whose scale is 0
        matrix = cases.packed_matrix(cases.workspace_of(tier), weight, None, fmt, group)
        assert torch.equal(matrix.dequantised(), as_packed(weight, fmt, group))


@pytest.mark.parametrize("fmt", ["bf16", "f32", "int4"])
@pytest.mark.parametrize("rows", [(64, 16, 16), (32, 7), (5, 40), (33,)])
def test_blocks_of_rows_are_packed_as_one_matrix(fmt: str, rows: tuple[int, ...]) -> None:
    """From where they lie, or joined where a panel would have rows of two."""
    workspace = cases.workspace_of("scalar")
    blocks = tuple(random_weight(n, 96).bfloat16() for n in rows)
    apart, whole = (PackedMatrix(workspace, weight, None, fmt) for weight in (blocks, torch.cat(blocks)))
    assert [bytes(part) for part in apart.parts()] == [bytes(part) for part in whole.parts()]
    assert apart.shape == whole.shape == (sum(rows), 96)


def test_blocks_that_make_no_matrix() -> None:
    numbers, workspace = _core.WeightFormat("f32", 0, "f32"), cases.workspace_of("scalar")
    for blocks, why in (
        ([torch.ones(16, 32), torch.ones(16, 48)], "differ in length"),
        ([torch.ones(17, 32), torch.ones(16, 32)], "whole panels of 16"),
    ):
        with pytest.raises(ValueError, match=why):
            _core.PackedMatrix(workspace, blocks, None, numbers)
    with pytest.raises(KernelError, match="at least one block"):
        _core.PackedMatrix(workspace, [], None, numbers)


def test_rounding_rows_is_off_by_half_a_step() -> None:
    weight = random_weight(64, 256)
    step = weight.abs().amax(-1, keepdim=True) / 127
    assert ((as_packed(weight, "int8", 0) - weight).abs() <= step * (0.5 + 128 * cases.F32_UNIT)).all()


@pytest.mark.parametrize(
    ("fmt", "group", "gain"), [("int8", 32, 0.9), ("int4", 32, 0.95), ("int4", 128, 0.95)]
)
def test_groups_are_rounded_better_than_by_their_largest_weight(fmt: str, group: int, gain: float) -> None:
    """No group is worse, beyond what rounding its scale to bfloat16 costs; together they are better."""
    weight = random_weight(64, 256)
    found, plain = (
        (f(weight, fmt, group) - weight).view(64, -1, group).square().sum(-1)
        for f in (as_packed, dequantised)
    )
    squares = weight.view(64, -1, group).square().sum(-1)
    assert (found <= plain + cases.BF16_UNIT**2 * squares).all()
    assert found.sum() < gain * plain.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, 1e-42])
@pytest.mark.parametrize(("fmt", "group"), [("int8", 32), ("int8", 0), ("int4", 64)])
def test_weights_that_are_no_numbers_stay_in_their_row(
    fmt: str, group: int, value: float, dtype: torch.dtype
) -> None:
    weight = random_weight(32, 128)
    weight[5, 7] = value
    packed = cases.packed_matrix(
        cases.workspace_of("scalar"), weight.to(dtype), None, fmt, group
    ).dequantised()
    others = torch.arange(32) != 5
    assert torch.equal(packed[others], as_packed(weight.to(dtype), fmt, group)[others])
    assert torch.isfinite(packed[others]).all()


@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
def test_activation_and_output_types(tier: str, x_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """float32 activations are rounded to bfloat16 at the entry; a bfloat16 output is the float32 one rounded."""
    cases.require_tier(tier)
    matrix = PackedMatrix(cases.workspace_of(tier), random_weight(75, 333), None, "bf16")
    x = cases.activations(11, 333, "f32")
    y = matrix(x.to(x_dtype), out_dtype)
    assert y.dtype is out_dtype
    assert torch.equal(y, matrix(x.bfloat16(), torch.float32).to(out_dtype))


@pytest.mark.parametrize("tier", cases.TIERS)
def test_float32_weights_take_bfloat16_activations(tier: str) -> None:
    cases.require_tier(tier)
    matrix = PackedMatrix(cases.workspace_of(tier), random_weight(40, 100), None, "f32")
    x = cases.activations(5, 100, "bf16")
    assert torch.equal(matrix(x, torch.float32), matrix(x.float()))


def test_no_rows() -> None:
    matrix = PackedMatrix(cases.workspace_of("scalar"), random_weight(40, 100), None, "bf16")
    assert matrix(torch.empty(0, 100)).shape == (0, 40)
