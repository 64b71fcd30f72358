"""GGUF's block types → `WeightCodes`: which there are, and the older and smaller ones. Nothing is rounded.

Layouts are ggml-common.h's. Q5_1 and Q5_K, codes of five bits with offsets, have no such form: they become numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.formats.codes import (
    WeightCodes,
    gguf_q4_0,
    gguf_q4_1,
    gguf_q4_k,
    gguf_q6_k,
    gguf_q8_0,
    gguf_rows,
    half_at,
    join_nibbles,
)

_PAIRS = (0, 2, 4, 6)  # shifts of the four 2-bit codes in a byte
_BITS = tuple(range(8))


def gguf_q5_0(data: Tensor) -> WeightCodes:
    """Q5_0 [N, K / 32 * 22]: a half, 32 upper bits, 16 bytes as Q4_0's; codes of 5 bits, - 16, kept as int8."""
    blocks = gguf_rows(data, 22)
    packed = blocks[..., 6:]
    low = torch.cat((packed & 15, packed >> 4), -1)
    high = torch.stack([blocks[..., 2:6] >> bit & 1 for bit in _BITS], -1).flatten(2)
    codes = ((low | high << 4) - 16).flatten(1)  # wraps around to two's complement
    return WeightCodes(codes, half_at(blocks, 0).flatten(1), "int8", 32, codes.shape[1])


def gguf_q2_k(data: Tensor) -> WeightCodes:
    """Q2_K [N, K / 256 * 84]: 16 scales and minima of 4 bits in a byte each, 256 codes of 2 bits, two halves.

    weight = d * scale * code - dmin * minimum, in groups of 16.
    """
    blocks = gguf_rows(data, 84)
    packed, codes = blocks[..., :16], _pairs(blocks[..., 16:80]).flatten(1)
    scales, offsets = half_at(blocks, 80) * (packed & 15), -half_at(blocks, 82) * (packed >> 4)
    return WeightCodes(
        join_nibbles(codes), scales.flatten(1), "uint4", 16, codes.shape[1], offsets=offsets.flatten(1)
    )


def gguf_q3_k(data: Tensor) -> WeightCodes:
    """Q3_K [N, K / 256 * 110]: 256 upper bits, 256 lower pairs, 16 scales of 6 bits (- 32) in 12 bytes, a half.

    Codes of 3 bits, - 4, in groups of 16; they are kept as int4.
    """
    blocks = gguf_rows(data, 110)
    high = torch.stack([blocks[..., :32] >> bit & 1 for bit in _BITS], -2).flatten(2)
    codes = ((_pairs(blocks[..., 32:96]) | high << 2) - 4 & 15).flatten(1)
    scales = half_at(blocks, 108) * _q3_scales(blocks[..., 96:108])
    return WeightCodes(join_nibbles(codes), scales.flatten(1), "int4", 16, codes.shape[1])


def _q3_scales(packed: Tensor) -> Tensor:
    """Low halves of 8 bytes, then their high halves, are the lower 4 bits; 4 bytes hold 16 upper pairs."""
    low = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), -1)
    high = torch.cat([packed[..., 8:] >> shift & 3 for shift in _PAIRS], -1)
    return (low | high << 4).to(torch.int8) - 32


def _pairs(packed: Tensor) -> Tensor:
    """2-bit codes [N, blocks, 64] → [N, blocks, 256]: of each 32 bytes first all lowest pairs, then the next."""
    halves = packed.unflatten(-1, (2, 1, 32))
    return torch.cat([halves >> shift & 3 for shift in _PAIRS], -2).flatten(2)


GGUF_CODES: dict[str, Callable[[Tensor], WeightCodes]] = {
    "Q2_K": gguf_q2_k,
    "Q3_K": gguf_q3_k,
    "Q4_0": gguf_q4_0,
    "Q4_1": gguf_q4_1,
    "Q4_K": gguf_q4_k,
    "Q5_0": gguf_q5_0,
    "Q6_K": gguf_q6_k,
    "Q8_0": gguf_q8_0,
}
"""Rows of raw blocks, uint8 [N, bytes], by ggml's name of the block type."""
