"""Int8 activations in plain torch: the reference of the kernels, and the bound of their error.

A row of activations is cut into groups along K, those of the weights (128 where an output row has one scale). Where
weights' scales are integers times a half that 256 k share (GGUF's K-quants, IQ4_XS and codebooks), these are a group. A
group is codes from -127 to 127 times one float32 scale, max |x| / 127: an activation is off by half a scale at most.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_SCALED_GROUP = 128  # of activations, where weights have one scale per output row
SHARED_BLOCK = 256  # likewise, where weights' scales share halves


def activation_group(weight_group: int) -> int:
    """Activations along K that share a scale."""
    return weight_group or ROW_SCALED_GROUP


def rounded_codes(x: Tensor, weight_group: int) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes float32 [T, groups, group], zeros past K, and scales float32 [T, groups].

    A group with a number that is not finite has the scale NaN; one whose numbers are all below 1e-30 counts as zeros.
    """
    group = activation_group(weight_group)
    groups = F.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    scales = groups.abs().amax(-1) / 127
    scales = torch.where(groups.isfinite().all(-1), scales, torch.nan)
    factors = torch.where(scales * 127 > 1e-30, 1 / scales, 0.0)
    codes = (groups * factors[..., None]).round().clamp(-127, 127)
    return codes.nan_to_num(127.0), scales


def rounded_to_int8(x: Tensor, weight_group: int) -> Tensor:
    """The activations that the codes stand for, float32 [T, K]."""
    codes, scales = rounded_codes(x, weight_group)
    return (codes * scales[..., None]).flatten(1)[:, : x.shape[1]]


def rounding_steps(x: Tensor, weight_group: int) -> Tensor:
    """Twice the largest rounding error of each activation, float32 [T, K]."""
    group = activation_group(weight_group)
    scales = rounded_codes(x, weight_group)[1]
    return scales.repeat_interleave(group, dim=1)[:, : x.shape[1]]
