"""Rounding that makes up for its own errors: what a column loses, the columns not yet rounded take over.

GPTQ (Frantar et al., arXiv:2210.17323), with scales searched for each group when its turn comes. Inputs matter through
the sums of their products alone, H = sum of x x^T: the output error of weights W - V is tr((W - V) H (W - V)^T).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.formats.rounding import IntegerGrid
from tandem.kernels.fit import fit_groups

DAMPING = 0.01  # of H's mean diagonal, added to all of it: inputs that calibration never saw still count


def compensated(weight: Tensor, products: Tensor, grid: IntegerGrid, group: int) -> tuple[Tensor, Tensor]:
    """int8 codes [N, K] and bfloat16 scales [N, K / group] for weight float32 [N, K], products float32 [K, K]."""
    rows, columns = weight.shape
    spread = _spread(products)
    importance = spread.diagonal().square().reciprocal()
    remaining = weight.T.contiguous()  # [K, N]: what is still to be represented
    codes = torch.empty(columns, rows, dtype=torch.int8)
    scales = torch.empty(rows, columns // group, dtype=torch.bfloat16)
    for start in range(0, columns, group):
        block = slice(start, start + group)
        _, fitted = fit_groups(remaining[block].T.contiguous(), grid, group, importance[block].contiguous())
        scales[:, start // group] = fitted[:, 0]
        errors = _round_block(remaining[block], codes[block], fitted[:, 0].float(), spread[block, block], grid)
        remaining[start + group :] -= spread[block, start + group :].T @ errors
    return codes.T.contiguous(), scales


def _round_block(remaining: Tensor, codes: Tensor, scale: Tensor, spread: Tensor, grid: IntegerGrid) -> Tensor:
    """Rounds a group of columns, one after the other; returns their errors relative to the spread, [group, N]."""
    errors = torch.empty_like(remaining)
    for j in range(len(remaining)):
        code = (remaining[j] / scale).round_().clamp_(grid.low, grid.high)
        codes[j] = code
        errors[j] = (remaining[j] - code * scale) / spread[j, j]
        remaining[j + 1 :].addr_(spread[j, j + 1 :], errors[j], alpha=-1)
    return errors


def _spread(products: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of `products`, damped as much as it takes to have one."""
    mean = products.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    damping = DAMPING
    while True:
        damped = products / mean
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                spread: Tensor = upper
                return spread
        damping *= 10
