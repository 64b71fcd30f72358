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
_TINY = 1e-30
_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbours
_E2M1_DECODED = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class IntegerGrid(NamedTuple):
    """Codes low … high. First guesses of a scale map the weight of largest magnitude to `first` … `last`.

    int4 uses all 16 codes: the extreme weight maps to a negative code, so a scale may be negative.
    """

    low: int
    high: int
    first: float
    last: float

    @property
    def targets(self) -> tuple[float, ...]:
        step = (self.last - self.first) / (SCALES_TRIED - 1)
        return tuple(self.first + i * step for i in range(SCALES_TRIED))


INT4 = IntegerGrid(-8, 7, -6.4, -10.4)
INT8 = IntegerGrid(-127, 127, 123.0, 131.0)


def fit_groups(
    weight: Tensor, grid: IntegerGrid, group: int, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """int8 codes [n, K] and bfloat16 scales [n, K / group]; `group` divides K.

    Each first guess of a scale gives codes, and codes q give their best scale s = <w, q> / <q, q>; the guess whose
    error is the least wins: |w - s q|^2 = |w|^2 - <w, q>^2 / <q, q>. With the rounded scale, codes are made anew.
    importance [K] >= 0: how much the squared error of a column counts (1 everywhere if None).
    """
    groups = weight.view(len(weight), -1, group)
    share = torch.ones(group) if importance is None else importance.view(-1, group)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    inverse = torch.where(extreme == 0, 0.0, 1 / extreme)
    best = torch.zeros_like(extreme)
    scales = torch.zeros_like(extreme)
    for target in grid.targets:
        codes = (groups * (inverse * target)).round().clamp(grid.low, grid.high)
        weighted = codes * share
        along, square = ((weighted * v).sum(-1, keepdim=True) for v in (groups, codes))
        gain = along * along / square.clamp(min=_TINY)
        better = gain > best
        best = torch.where(better, gain, best)
        scales = torch.where(better, along / square.clamp(min=_TINY), scales)
    scales = torch.where(scales == 0, 1.0, scales).to(torch.bfloat16)  # a group of zeros: any scale will do
    codes = (groups / scales.float()).round().clamp(grid.low, grid.high)
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
    codes = torch.where(take, finer, codes).to(torch.uint8)
    exponent = torch.where(take, exponent - 1, exponent)
    return join_nibbles(codes.flatten(1)), (exponent + 127).to(torch.uint8).squeeze(-1)


def _e2m1(groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes 0 … 15 on a scale of 2^exponent, and the squared error of every group."""
    scaled = groups / exponent.exp2()
    magnitude = torch.bucketize(scaled.abs(), torch.tensor(_E2M1_BOUNDARIES))
    error = torch.tensor(_E2M1_DECODED)[magnitude] * exponent.exp2() - groups.abs()
    return magnitude + 8 * (scaled < 0), error.square().sum(-1, keepdim=True)


def fit_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn codes [n, K] and one float32 scale per row, [n, 1]."""
    largest = weight.abs().amax(1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / E4M3_MAX)
    return (weight / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales
