"""int8 activations: exact against integers, within the rounding of activations against float64, and batch-invariant."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernel_cases as cases
from tandem.errors import KernelError
from tandem.formats.codes import WeightCodes, join_nibbles
from tandem.kernels.cpu import PackedExperts, PackedMatrix
from tandem.kernels.fit import as_packed
from tandem.kernels.int8_activations import rounded_codes, rounded_to_int8, rounding_steps

FORMATS = [
    ("int8", 32),
    ("int8", 128),
    ("int8", 0),
    ("int4", 32),
    ("int4", 128),
    ("int4_zeros", 64),
    ("mxfp4", 32),
    ("nvfp4", 16),
    ("int6", 16),
    ("int3", 16),
    ("int2_zeros", 16),
]
each_way = pytest.mark.parametrize(
    ("fmt", "group", "tier", "algorithm"), cases.pairwise(FORMATS, cases.TIERS, cases.ALGORITHMS)
)


# -- integers: nothing is rounded, so results are equal


def integer_codes(fmt: str, group: int, rows: int, depth: int) -> WeightCodes:
    """Random codes of the format, the extreme ones in rows of their own; every scale is 1."""
    random = torch.Generator().manual_seed(depth)
    levels = {"int8": 256, "int6": 64, "int3": 8, "int2_zeros": 4}.get(fmt, 16)
    codes = torch.randint(0, levels, (rows, depth), generator=random, dtype=torch.uint8)
    codes[0], codes[1] = levels // 2, levels // 2 - 1  # the least and the greatest in two's complement
    codes[2], codes[3] = 0, levels - 1
    groups = -(-depth // group) if group else 1
    scales = torch.ones(rows, groups, dtype=torch.bfloat16 if group else torch.float32)
    zeros = torch.randint(0, 16, (rows, groups), generator=random, dtype=torch.int8)
    joined = join_nibbles(codes) if levels == 16 else codes
    name = cases.CODE_TYPES.get(fmt, fmt)
    return WeightCodes(joined, scales, name, group, depth, zeros=zeros if fmt.endswith("_zeros") else None)


def integer_rows(count: int, depth: int, group: int) -> Tensor:
    """Integers from -127 to 127, with a 127 in every group, so that its scale is 1; bfloat16 holds them exactly."""
    random = torch.Generator().manual_seed(count)
    x = torch.randint(-127, 128, (count, depth), generator=random).float()
    x[:, :: group or 128] = 127
    x[0] = 127
    if count > 1:
        x[1] = -127
    return x.bfloat16()


@each_way
def test_integers_are_exact(fmt: str, group: int, tier: str, algorithm: str) -> None:
    """Sums stay below 2^24, so float32 must hold them exactly: an overflow or a saturated product would show."""
    cases.require_tier(tier)
    for depth in (33, 256, 1000):
        codes = integer_codes(fmt, group, 75, depth)
        matrix = PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), codes)
        assert matrix.tier == tier
        weight = matrix.dequantised().double()
        for rows in (1, 2, 5, 40):
            x = integer_rows(rows, depth, group)
            expected = x.double() @ weight.T
            assert expected.abs().max() < 2**24
            assert torch.equal(matrix.with_int8_activations(x, torch.float32).double(), expected)


# -- errors


def error_bound(x: Tensor, weight: Tensor, size: Tensor, fmt: str, group: int, tier: str) -> Tensor:
    """Activations are off by half a step (a little more, since scales are rounded); the rest as for any product."""
    steps = rounding_steps(x, group).double()
    rounding = (0.5 + 127 * 4 * cases.F32_UNIT) * steps @ weight.abs().T
    larger = x.double().abs() + steps
    return rounding + cases.product_bound(larger @ size.T, x.shape[1], fmt, group, tier)


@each_way
def test_error_is_that_of_rounding_activations(
    fmt: str, group: int, tier: str, algorithm: str, record_property: Callable[[str, object], None]
) -> None:
    """Against float64 of the weights' own numbers and unrounded activations. `pytest -rP` shows the errors."""
    cases.require_tier(tier)
    worst, usual = 0.0, 0.0
    for n, k in ((1, 1), (33, 65), (75, 333), (40, 1100)):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
        matrix = cases.packed_matrix(cases.workspace_of(tier, algorithm), weight, None, fmt, group)
        exact = as_packed(weight, fmt, group).double()
        size = cases.magnitude_of(weight, fmt, group).double()
        for rows in (1, 3, 17):
            x = cases.activations(rows, k, fmt)
            expected = x.double() @ exact.T
            error = (matrix.with_int8_activations(x, torch.float32).double() - expected).abs()
            assert (error <= error_bound(x, exact, size, fmt, group, tier)).all(), (n, k, rows)
            worst = max(worst, float(error.norm() / expected.norm()))
            usual = max(usual, float((matrix(x, torch.float32).double() - expected).norm() / expected.norm()))
    record_property("relative_error", worst)
    print(f"{fmt} g{group} {tier} {algorithm}: relative error {worst:.2e}, with bf16 activations {usual:.1e}")


@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize(("fmt", "group"), [("int8", 32), ("int8", 0), ("int4", 128), ("int4_zeros", 32)])
def test_rows_are_rounded_as_the_reference_rounds_them(fmt: str, group: int, tier: str) -> None:
    """Multiplied with the rounded activations, only the sums' own rounding is left."""
    cases.require_tier(tier)
    weight = torch.randn(40, 700, generator=torch.Generator().manual_seed(1))
    x = cases.activations(9, 700, "f32") * torch.logspace(-3, 3, 9)[:, None]
    matrix = cases.packed_matrix(cases.workspace_of(tier), weight, None, fmt, group)
    exact, size = as_packed(weight, fmt, group).double(), cases.magnitude_of(weight, fmt, group).double()
    rounded = rounded_to_int8(x, group).double()
    error = (matrix.with_int8_activations(x).double() - rounded @ exact.T).abs()
    # Where x / scale lies next to a half, another rounding of 1 / scale may choose the neighbour.
    codes = rounded_codes(x, group)[0].flatten(1)[:, :700]
    exact_codes = (x.double() / rounding_steps(x, group).double()).abs() % 1
    near = ((exact_codes - 0.5).abs() < 1e-4) * rounding_steps(x, group).double()
    bound = cases.product_bound((rounded.abs() + near) @ size.T, 700, fmt, group, tier) + near @ exact.abs().T
    assert codes.abs().max() == 127
    assert (error <= bound).all()


@pytest.mark.parametrize("tier", cases.TIERS)
def test_numbers_that_are_none_and_very_small_ones(tier: str) -> None:
    """Infinity and NaN spoil their own row and no other; a group of zeros or denormals gives 0."""
    cases.require_tier(tier)
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    matrix = PackedMatrix(cases.workspace_of(tier), weight, None, "int8", 32)
    x = cases.activations(6, 256, "f32")
    x[1, 100], x[2, 200], x[3], x[4] = torch.inf, torch.nan, 0, 1e-42
    y = matrix.with_int8_activations(x)
    assert y[1].isnan().all() and y[2].isnan().all()
    assert (y[3] == 0).all() and (y[4] == 0).all()
    assert torch.equal(y[0], matrix.with_int8_activations(x[:1])[0]) and y[5].isfinite().all()


# -- experts

EXPERTS, HIDDEN, WIDTH = 7, 150, 72


@functools.cache
def layer_of(
    fmt: str, group: int, tier: str, algorithm: str = "auto", threads: int = 1, int8_activations: bool = True
) -> PackedExperts:
    random = torch.Generator().manual_seed(2)
    workspace = cases.workspace_of(tier, algorithm, threads)
    layer = PackedExperts(
        workspace, EXPERTS, HIDDEN, WIDTH, fmt if fmt in ("int8", "int4") else "bf16",
        group=group, int8_activations=int8_activations,
    )  # fmt: skip
    for expert in range(EXPERTS):
        gate, up = torch.randn(2, WIDTH, HIDDEN, generator=random) / HIDDEN**0.5
        down = torch.randn(HIDDEN, WIDTH, generator=random) / WIDTH**0.5
        cases.load_expert(layer, expert, (gate, up, down), fmt, group)
    return layer


@functools.cache
def routed() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, EXPERTS + 1, (300, 3), generator=random, dtype=torch.int32)
    return cases.activations(300, HIDDEN, "bf16"), ids, torch.rand(300, 3, generator=random)


@functools.cache
def tokens_alone(fmt: str, group: int, tier: str) -> Tensor:
    x, ids, weights = routed()
    layer = layer_of(fmt, group, tier)
    return torch.cat([layer.forward(x[t, None], ids[t, None], weights[t, None]) for t in range(len(x))])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.integers(0, 150),
    rows=st.integers(1, 150),
    algorithm=st.sampled_from(["dot_rows", "tile_mm", "auto"]),
    threads=st.integers(1, 3),
)
@pytest.mark.parametrize("tier", cases.INVARIANT_TIERS)
@pytest.mark.parametrize(("fmt", "group"), [("int8", 32), ("int8", 0), ("int4", 64), ("int6", 16)])
def test_expert_rows_do_not_depend_on_the_batch(
    fmt: str, group: int, tier: str, first: int, rows: int, algorithm: str, threads: int
) -> None:
    cases.require_tier(tier)
    part = [t[first : first + rows].contiguous() for t in routed()]
    y = layer_of(fmt, group, tier, algorithm, threads).forward(*part)
    assert torch.equal(y, tokens_alone(fmt, group, tier)[first : first + rows])


def expected_experts(fmt: str, group: int, rounding: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`layer_of`'s result on `routed` in float64, activations rounded before each product."""
    random = torch.Generator().manual_seed(2)
    x, ids, weights = routed()
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(EXPERTS):
        gate, up = torch.randn(2, WIDTH, HIDDEN, generator=random) / HIDDEN**0.5
        down = torch.randn(HIDDEN, WIDTH, generator=random) / WIDTH**0.5
        g, u, d = (as_packed(w, fmt, group).double() for w in (gate, up, down))
        rounded = rounding(x.float(), group).double()
        hidden = torch.nn.functional.silu(rounded @ g.T) * (rounded @ u.T)
        y = rounding(hidden.bfloat16().float(), group).double() @ d.T
        total += y * (weights * (ids == expert)).sum(1, keepdim=True)
    return total


@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize(("fmt", "group"), [("int8", 32), ("int8", 0), ("int4", 128), ("mxfp4", 32)])
def test_experts_round_both_activations(fmt: str, group: int, tier: str) -> None:
    """Nearer to the model with rounded activations than that is to the unrounded one: both roundings happen, and no
    other. (A float's last bit decides single codes of the second rounding, so there is no tight bound.)"""
    cases.require_tier(tier)
    x, ids, weights = routed()
    out = torch.empty(x.shape, dtype=torch.float32)
    y = layer_of(fmt, group, tier, "dot_rows").forward(x, ids, weights, out).double()
    rounded = expected_experts(fmt, group, rounded_to_int8)
    plain = expected_experts(fmt, group, lambda values, _: values)
    cost = (rounded - plain).norm()
    assert 1e-3 < cost / plain.norm() < 2e-2
    assert (y - rounded).norm() < 0.3 * cost


@pytest.mark.parametrize("tier", ["amx", "amx_standin"])
def test_many_rows_are_not_rounded_where_there_are_tiles(tier: str) -> None:
    """Experts with few rows round, those with many give what they give without the mode, in one batch."""
    cases.require_tier(tier)
    x, ids, weights = (part[:20].contiguous() for part in routed())
    ids = torch.where(ids < 2, ids, 3)
    assert [int((ids == expert).sum()) < 12 for expert in (0, 1, 3)] == [True, True, False]
    rounding, usual = (layer_of("int4", 64, tier, int8_activations=mode) for mode in (True, False))
    weight_of_many = weights * (ids == 3)
    assert torch.equal(rounding.forward(x, ids, weight_of_many), usual.forward(x, ids, weight_of_many))
    few = (ids == 0) | (ids == 1)
    assert not torch.equal(rounding.forward(x, ids, weights * few), usual.forward(x, ids, weights * few))
    bits = rounding.forward(x, ids, weights)
    assert torch.equal(bits, rounding.forward(x.float(), ids, weights).bfloat16())


def test_the_packed_bytes_are_those_of_the_usual_mode() -> None:
    workspace = cases.workspace_of("scalar")
    layers = [
        PackedExperts(workspace, 1, HIDDEN, WIDTH, "int4", int8_activations=rounding)
        for rounding in (False, True)
    ]
    gate, up = torch.randn(2, WIDTH, HIDDEN)
    down = torch.randn(HIDDEN, WIDTH)
    for layer in layers:
        layer.load(0, gate, up, down)
    assert torch.equal(layers[0].packed(0), layers[1].packed(0))


@pytest.mark.parametrize(("fmt", "group"), [("bf16", 0), ("f32", 0), ("fp8", 128)])
def test_formats_without_integer_codes_are_refused(fmt: str, group: int) -> None:
    workspace = cases.workspace_of("scalar")
    weight = torch.randn(64, 64)
    matrix = cases.packed_matrix(workspace, weight, None, fmt, group)
    with pytest.raises(KernelError, match=f"int8 activations do not exist for experts of {fmt}"):
        matrix.with_int8_activations(torch.zeros(1, 64))
    layer = PackedExperts(
        workspace, 1, 64, 64, fmt if group == 0 else "bf16", group=group, int8_activations=True
    )
    with pytest.raises(KernelError, match="only for int8, int4"):
        cases.load_expert(layer, 0, (weight, weight, weight), fmt, group)
