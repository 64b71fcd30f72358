"""Granularity of scales, from a scale tensor's shape: one scale per tensor, row, group or block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.checkpoint.parts import TensorPart
from tandem.checkpoint.quant_hints import QuantHints
from tandem.errors import CheckpointError

E8M0 = ("F8_E8M0", "U8")  # powers of two; older files have them as plain bytes
NUMBERS = ("F32", "BF16", "F16", *E8M0)
_POWERS = tuple(1 << i for i in range(3, 13))
_BLOCK = (128, 128)


class Scaling(NamedTuple):
    """`group` weights along K and `block_rows` rows share a scale; 0: all of them."""

    group: int
    block_rows: int

    def matrix(self, scale: Tensor) -> Tensor:
        """[N] or one number → [N or 1, groups]."""
        return scale.reshape(-1, 1) if self.group == 0 else scale


def groups_of(depth: int, group: int) -> int:
    return -(-depth // group)


def as_numbers(scale: Tensor) -> Tensor:
    """e8m0 as bfloat16, which has all of them; other types as they are."""
    if scale.dtype is torch.uint8:
        scale = scale.contiguous().view(torch.float8_e8m0fnu)
    return scale.to(torch.bfloat16) if scale.dtype is torch.float8_e8m0fnu else scale


def scaling(part: TensorPart, shape: tuple[int, int], hints: QuantHints, *, transposed: bool = False) -> Scaling:
    """Granularity of the scales of a matrix [N, K]. `transposed`: scales are [groups, N] (GPTQ, AWQ)."""
    if part.dtype not in NUMBERS:
        raise part.wrong(f"is {part.dtype}; scales here are {', '.join(NUMBERS)}")
    n, k = shape
    sizes = tuple(reversed(part.shape)) if transposed else part.shape
    if sizes in ((n, 1), (n,)):
        return Scaling(0, 1)
    if sizes in ((), (1,), (1, 1)):
        return Scaling(0, 0)
    if len(sizes) == 2 and sizes[0] == n:
        return Scaling(_group(part, k, sizes[1], hints), 1)
    return _block(part, shape, hints)


def _group(part: TensorPart, depth: int, count: int, hints: QuantHints) -> int:
    """The group size of which `count` cover K; several can only where K is no multiple of it."""
    fitting = [g for g in (*hints.groups, *(b[1] for b in hints.blocks)) if groups_of(depth, g) == count]
    fitting += [g for g in _POWERS if groups_of(depth, g) == count]
    if fitting:
        return fitting[0]
    if count and depth % count == 0:
        return depth // count
    raise part.wrong(
        f"has {count} scales for {depth} weights of a row; no group size fits. "
        f"If one does, say it in {hints.where}.group_size, for example 128"
    )


def _block(part: TensorPart, shape: tuple[int, int], hints: QuantHints) -> Scaling:
    for rows, columns in (*hints.blocks, _BLOCK):
        if part.shape == (groups_of(shape[0], rows), groups_of(shape[1], columns)):
            return Scaling(columns, rows)
    raise _no_block(part, shape, hints)


def _no_block(part: TensorPart, shape: tuple[int, int], hints: QuantHints) -> CheckpointError:
    sizes = ", ".join(f"[{rows}, {columns}]" for rows, columns in hints.blocks)
    tried = f"{hints.where} says blocks of {sizes}" if sizes else "blocks of [128, 128] do not fit"
    power = next((p for p in _POWERS if part.shape == tuple(groups_of(size, p) for size in shape)), 0)
    advice = f"; try {hints.where}.weight_block_size = [{power}, {power}]" if power and not sizes else ""
    return part.wrong(f"has shape {part.shape}, but its weight has {shape} and {tried}{advice}")
