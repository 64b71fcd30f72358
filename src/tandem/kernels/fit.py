"""`fit_groups` on the C++ core; `formats.rounding.fit_groups` is its reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem import _core
from tandem.formats.reference import dequantised
from tandem.formats.rounding import INT4, INT8, IntegerGrid

_GRIDS = {"int4": INT4, "int8": INT8}


def fit_groups(
    weight: Tensor, grid: IntegerGrid, group: int, importance: Tensor | None = None, tier: str | None = None
) -> tuple[Tensor, Tensor]:
    """int8 codes [n, K] and bfloat16 scales [n, K / group] of weight float32 [n, K]; on the calling thread alone.

    tier: the widest that this CPU has if None; AVX2 and wider ones agree to the bit.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // group, dtype=torch.bfloat16)
    tier = tier or _core.supported_tiers()[-1]
    _core.fit_groups(tier, weight.contiguous(), importance, codes, scales, grid.low, grid.high, grid.targets)
    return codes, scales


def as_packed(weight: Tensor, fmt: str, group: int = 32) -> Tensor:
    """The float32 [N, K] numbers that `weight` stands for once it is packed as `fmt`, to the bit."""
    if fmt not in _GRIDS or group == 0:
        return dequantised(weight, fmt, group)
    columns = weight.shape[1]
    padded = F.pad(weight.float(), (0, -columns % group))
    codes, scales = fit_groups(padded, _GRIDS[fmt], group)
    return (codes * scales.float().repeat_interleave(group, 1))[:, :columns].contiguous()
