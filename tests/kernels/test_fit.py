"""Rounding to integer codes: the C++ kernel against plain torch, and both against what the grid can say."""

from __future__ import annotations

import pytest
import torch

import kernel_cases as cases
from tandem import _core
from tandem.errors import KernelError
from tandem.formats.rounding import INT4, INT8, fit_fp8, fit_groups, fit_mxfp4
from tandem.kernels import fit

TIERS = [tier for tier in _core.supported_tiers() if tier != "amx"]  # amx takes avx512_bf16's


def heavy(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    return weight * (0.3 * torch.randn(rows, columns, generator=generator)).exp()


def errors(weight, codes, scales, group, importance=None):
    """Squared error of every group."""
    off = (weight - codes.float() * scales.float().repeat_interleave(group, 1)).square()
    return (off if importance is None else off * importance).view(len(weight), -1, group).sum(-1)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("grid", [INT4, INT8])
@pytest.mark.parametrize("rows, columns, group", [(1, 32, 32), (7, 96, 32), (5, 128, 64), (3, 1152, 128)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kernel_is_as_good_as_its_reference(tier, grid, rows, columns, group, weighted):
    weight, importance = heavy(rows, columns), heavy(1, columns, 1)[0].square() if weighted else None
    codes, scales = fit.fit_groups(weight, grid, group, importance, tier)
    expected_codes, expected_scales = fit_groups(weight, grid, group, importance)
    # Sums are added in another order. Where initial scales are equally good to the last bits of the sum, another may be
    # chosen. What is lost by it are these bits.
    found, expected = (
        errors(weight, *fitted, group, importance)
        for fitted in ((codes, scales), (expected_codes, expected_scales))
    )
    squares = errors(weight, torch.zeros_like(codes), scales, group, importance)
    assert (
        (found - expected).abs() <= 1e-5 * expected + group * torch.finfo(torch.float32).eps * squares
    ).all()
    assert codes.min() >= grid.low and codes.max() <= grid.high


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier.startswith("avx")])
def test_vector_tiers_agree_to_the_bit(tier):
    weight = heavy(33, 256)
    for found, expected in zip(
        fit.fit_groups(weight, INT4, 32, None, tier),
        fit.fit_groups(weight, INT4, 32, None, cases.PLAIN_TIER),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("grid", [INT4, INT8])
def test_weights_on_the_grid_stay_as_they_are(tier, grid):
    codes = torch.arange(64).remainder(grid.high - grid.low + 1).add(grid.low).view(2, 32)
    codes[:, 0] = grid.low  # so that the largest code is there to find the scale by
    weight = codes * torch.tensor([[0.0078125], [-1.5]])
    found, scales = fit.fit_groups(weight, grid, 32, None, tier)
    assert torch.equal(found * scales.float().repeat_interleave(32, 1), weight)


@pytest.mark.parametrize("tier", TIERS)
def test_extreme_groups(tier):
    """Zeros, one weight only, and magnitudes at both ends of float32."""
    weight = torch.zeros(5, 32)
    weight[1, 3], weight[2, :2], weight[3], weight[4] = -2.0, torch.tensor([1e-30, 2e-30]), 3e37, 1e-42
    codes, scales = fit.fit_groups(weight, INT4, 32, None, tier)
    assert torch.isfinite(scales.float()).all() and (scales != 0).all()
    back = codes * scales.float()
    assert torch.equal(back[0], weight[0]) and torch.equal(back[1], weight[1])
    assert torch.allclose(back[3], weight[3], rtol=2**-8) and torch.allclose(back[2], weight[2], rtol=0.1)


@pytest.mark.parametrize("tier", TIERS)
def test_importance_buys_precision_where_it_counts(tier):
    weight, importance = heavy(64, 256), torch.ones(256)
    importance[::32] = 100.0
    plain, weighted = (fit.fit_groups(weight, INT4, 32, share, tier) for share in (None, importance))
    assert (
        errors(weight, *weighted, 32, importance).sum() < 0.8 * errors(weight, *plain, 32, importance).sum()
    )


def test_arrays_that_do_not_fit_are_named():
    weight, codes = torch.zeros(2, 64), torch.zeros(2, 64, dtype=torch.int8)
    for width in (0, 1, 3, 8):  # groups of nothing, 64 (fine), no whole number, 8
        scales = torch.zeros(2, width, dtype=torch.bfloat16)
        if width != 1:
            with pytest.raises(KernelError, match="group of 16 to 256 in steps of 16"):
                _core.fit_groups("scalar", weight, None, codes, scales, -8, 7, [-8.0])
    with pytest.raises(KernelError, match="importance"):
        _core.fit_groups(
            "scalar", weight, torch.ones(63), codes, torch.zeros(2, 1, dtype=torch.bfloat16), -8, 7, []
        )


def test_mxfp4_takes_the_better_of_two_exponents():
    weight = heavy(64, 256)
    codes, scales = fit_mxfp4(weight)
    assert codes.shape == (64, 128) and scales.shape == (64, 8)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.view(64, 8, 32)

    def error(exponent):
        scaled = groups.abs() / torch.exp2(exponent)[..., None]
        nearest = (scaled[..., None] - values).abs().min(-1).values
        return (nearest * torch.exp2(exponent)[..., None]).square().sum(-1)

    chosen, tried = error(scales.float() - 127), [error(scales.float() - 127 + step) for step in (-1, 1)]
    assert all((chosen <= other * (1 + 1e-5)).all() for other in tried)


def test_fp8_is_off_by_half_a_step_at_most():
    weight = heavy(16, 256)
    weight[3] = 0
    codes, scales = fit_fp8(weight)
    step = torch.exp2(torch.floor(torch.log2((weight / scales).abs().clamp(min=2.0**-6)))) * 2.0**-3
    assert ((codes.float() - weight / scales).abs() <= step / 2 * (1 + 2**-20)).all()
    assert torch.equal(codes[3].float(), weight[3])
