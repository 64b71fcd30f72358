"""How a weight matrix becomes codes and scales with the least error, in plain torch: the reference of csrc/micro/fit.h.

Every function rounds some rows of a matrix, float32 [n, K], on their own, so a matrix may be cut anywhere between rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.formats.codes import join_nibbles
from tandem.formats.reference import E2M1_MAX, E4M3_MAX

SCALES_TRIED = 16
_NOTHING = 2.0**-120  # groups of smaller weights are zeros: one over them is infinite soon
_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbours
_E2M1_STEPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0)  # from a neighbour to the next


class IntegerGrid(NamedTuple):
    """Codes low … high. Initial scales give the weight of the largest magnitude the code `likely`, or one up
    to `spread` away.

    int4 uses all 16 codes: that weight's code is negative, so a scale may be negative.
    """

    low: int
    high: int
    likely: float
    spread: float

    @property
    def targets(self) -> tuple[float, ...]:
        """The likely one first: it is taken where others are no better."""
        half = SCALES_TRIED // 2
        steps = sorted(range(-half, half), key=abs)
        return tuple(self.likely + self.spread * step / half for step in steps)


INT4 = IntegerGrid(-8, 7, -8, 2.4)
INT8 = IntegerGrid(-127, 127, 127, 4)


def fit_groups(
    weight: Tensor, grid: IntegerGrid, group: int, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """int8 codes [n, K] and bfloat16 scales [n, K / group]; `group` divides K.

    Each initial scale gives codes q, and these give their best scale s = <w, q> / <q, q>. The one with the
    least error wins: |w - s q|^2 = |w|^2 - <w, q>^2 / <q, q>. With the rounded scale, codes are made anew.
    importance [K] >= 0: how much the squared error of a column counts (1 everywhere if None).
    """
    groups = weight.view(len(weight), -1, group)
    share = torch.ones(group) if importance is None else importance.view(-1, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    extreme = torch.where(high >= -low, high, low)
    relative = groups * torch.where(extreme.abs() < _NOTHING, 0.0, 1 / extreme)
    best, ratio = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for target in grid.targets:
        codes = (relative * target).round().clamp(grid.low, grid.high)
        counted = codes * share
        along, square = ((counted * v).sum(-1, keepdim=True) for v in (relative, codes))
        factor = torch.where(square > 0, along / square, 0.0)
        better = factor * along > best
        best = torch.where(better, factor * along, best)
        ratio = torch.where(better, factor, ratio)
    scales = (extreme * ratio).to(torch.bfloat16)
    scales = torch.where(scales == 0, 1.0, scales)  # a group of zeros: any scale will do
    codes = (groups * (1 / scales.float())).round().clamp(grid.low, grid.high)
    return codes.to(torch.int8).flatten(1), scales.squeeze(-1)


def fit_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """OCP MXFP4: codes uint8 [n, K / 2], even k in the low half, and e8m0 scales uint8 [n, K / 32].

    Of the smallest power of two that clips nothing and the one below, whichever has the smaller squared error.
    """
    groups = weight.view(len(weight), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    exponent = torch.log2(largest / E2M1_MAX).ceil()
    (codes, error), (finer, finer_error) = (_e2m1(groups, e) for e in (exponent, exponent - 1))
    take = finer_error < error
    codes = torch.where(take, finer, codes)
    exponent = torch.where(take, exponent - 1, exponent)
    return join_nibbles(codes.flatten(1)), (exponent + 127).to(torch.uint8).squeeze(-1)


def _e2m1(groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes 0 … 15 on a scale of 2^exponent, and the squared error of every group."""
    scale = exponent.exp2()
    size = (groups / scale).abs()
    magnitude = torch.zeros_like(size, dtype=torch.uint8)
    rounded = torch.zeros_like(size)
    for boundary, step in zip(_E2M1_BOUNDARIES, _E2M1_STEPS, strict=True):
        above = size > boundary
        magnitude += above
        rounded += above * step
    error = ((rounded - size) * scale).square().sum(-1, keepdim=True)
    return magnitude + 8 * (groups < 0).to(torch.uint8), error


def fit_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn codes [n, K] and one float32 scale per row, [n, 1]."""
    largest = weight.abs().amax(1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / E4M3_MAX)
    return (weight / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales
