"""What each packed weight format holds, in plain torch: the codes and scales that csrc/format/pack.cc must produce.

int8: symmetric, scale = max|w| / 127. int4: codes -8 to 7, scale = (weight of the largest magnitude) / -8, which uses
all 16 codes. Scales of groups are bfloat16 (codes are made with the rounded scale), scales of rows float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import KernelError


class Quantised(NamedTuple):
    """codes float32 [N, groups, group] of integers; scales float32 [N, groups, 1]."""

    codes: Tensor
    scales: Tensor


def quantise(weight: Tensor, fmt: str, group: int) -> Quantised:
    """weight [N, K] as int8 or int4 codes; group 0: one scale per row."""
    group_size = group or weight.shape[1]
    padded = F.pad(weight.float(), (0, -weight.shape[1] % group_size))
    groups = padded.view(weight.shape[0], -1, group_size)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = extreme.abs() / 127 if fmt == "int8" else extreme / -8
    if group:
        scales = scales.to(torch.bfloat16).float()
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    low, high = (-127, 127) if fmt == "int8" else (-8, 7)
    return Quantised((groups * inverse).round().clamp(low, high), scales)


def dequantised(weight: Tensor, fmt: str, group: int = 32) -> Tensor:
    """The float32 [N, K] weights that `weight` stands for once it is packed as `fmt`."""
    if fmt == "f32":
        return weight.float()
    if fmt == "bf16":
        return weight.to(torch.bfloat16).float()
    if fmt not in ("int8", "int4"):
        raise KernelError(f"unknown weight format {fmt!r}; these exist: bf16, f32, int8, int4")
    codes, scales = quantise(weight, fmt, group)
    return (codes * scales).flatten(1)[:, : weight.shape[1]].contiguous()
