"""Weights of compressed attention beside its shape, and how channels turn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CompressionWeights(NamedTuple):
    """Weights of entries of one width D, float32. bias [rows, D]: of gates, oldest token first; norm [D]."""

    bias: Tensor
    norm: Tensor


class CompressedWeights(NamedTuple):
    """cos, sin float32 [positions, pairs]; sinks float32 [H]; groups [G, rank, H * D / G]: the output's first part;
    compressions: of entries, and of an index's."""

    cos: Tensor
    sin: Tensor
    sinks: Tensor
    groups: Tensor
    compressions: tuple[CompressionWeights, ...] = ()


def own_bias(bias: Tensor, overlap: bool) -> Tensor:
    """A stored bias [stride, series * D] by the tokens of an entry. The first series is for the entry after."""
    if not overlap:
        return bias
    before, own = bias.chunk(2, dim=1)
    return torch.cat((before, own))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D], whose last pairs of neighbours turn in place, in float32; cos, sin [..., pairs] broadcast."""
    pairs = x[..., -2 * cos.shape[-1] :].unflatten(-1, (-1, 2))
    a, b = pairs.float().unbind(-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    pairs[..., 0], pairs[..., 1] = first, second
    return x
