"""`fit_groups` on the C++ core; `formats.rounding.fit_groups` is its reference."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem.formats.rounding import IntegerGrid


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
