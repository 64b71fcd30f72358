"""GGUF's block types → `WeightCodes`. Nothing is rounded: halves stay halves, bytes that share a half stay bytes.

Layouts are ggml-common.h's. Codes of 5 bits are kept in 6.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.formats.codes import WeightCodes, join_nibbles
from tandem.formats.gguf_grids import GRID_CODES
from tandem.formats.gguf_raw import gguf_rows, half_at

_PAIRS = (0, 2, 4, 6)  # shifts of the four 2-bit codes in a byte
_BITS = tuple(range(8))


def _halves_of_16(packed: Tensor) -> Tensor:
    """Bytes [N, blocks, 16] → codes [N, blocks, 32]: low halves are k 0 to 15, high ones 16 to 31."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _signed(scales: Tensor) -> Tensor:
    """Bytes [N, blocks, groups] as int8 [N, all groups]."""
    return scales.contiguous().view(torch.int8).flatten(1)


def gguf_q8_0(data: Tensor) -> WeightCodes:
    """Q8_0 [N, K / 32 * 34]: a half and 32 int8 per block."""
    blocks = gguf_rows(data, 34)
    codes = blocks[..., 2:].flatten(1).contiguous()
    return WeightCodes(codes, half_at(blocks, 0), "int8", 32, codes.shape[1])


def gguf_q4_0(data: Tensor) -> WeightCodes:
    """Q4_0 [N, K / 32 * 18]: a half and 32 nibbles per block, + 8."""
    blocks = gguf_rows(data, 18)
    nibbles = _halves_of_16(blocks[..., 2:]).flatten(1) ^ 8
    return WeightCodes(join_nibbles(nibbles), half_at(blocks, 0), "int4", 32, nibbles.shape[1])


def gguf_q4_1(data: Tensor) -> WeightCodes:
    """Q4_1 [N, K / 32 * 20]: two halves, scale and minimum, and 32 nibbles per block."""
    blocks = gguf_rows(data, 20)
    nibbles = _halves_of_16(blocks[..., 4:]).flatten(1)
    codes, scales, offsets = join_nibbles(nibbles), half_at(blocks, 0), half_at(blocks, 2)
    return WeightCodes(codes, scales, "uint4", 32, nibbles.shape[1], offsets=offsets)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[N, blocks, 4] → [N, blocks, 32], each 0 or 16."""
    return torch.stack([packed >> bit & 1 for bit in _BITS], -1).flatten(2) << 4


def gguf_q5_0(data: Tensor) -> WeightCodes:
    """Q5_0 [N, K / 32 * 22]: a half, 32 upper bits, 32 nibbles; codes of 5 bits, - 16, kept as int6."""
    blocks = gguf_rows(data, 22)
    codes = ((_halves_of_16(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])) - 16).flatten(1)  # wraps around
    return WeightCodes(codes, half_at(blocks, 0), "int6", 32, codes.shape[1])


def gguf_q5_1(data: Tensor) -> WeightCodes:
    """Q5_1 [N, K / 32 * 24]: two halves, scale and minimum, 32 upper bits, 32 nibbles; kept as int6."""
    blocks = gguf_rows(data, 24)
    codes = (_halves_of_16(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).flatten(1)
    return WeightCodes(codes, half_at(blocks, 0), "int6", 32, codes.shape[1], offsets=half_at(blocks, 2))


def gguf_q2_k(data: Tensor) -> WeightCodes:
    """Q2_K [N, K / 256 * 84]: 16 scales and minima of 4 bits in a byte each, 256 codes of 2 bits, two halves.

    weight = d * scale * code - dmin * minimum, in groups of 16.
    """
    blocks = gguf_rows(data, 84)
    scales, codes = blocks[..., :16].flatten(1).contiguous(), _pairs(blocks[..., 16:80]).flatten(1)
    halves, offset_halves = half_at(blocks, 80), -half_at(blocks, 82)
    return WeightCodes(codes, scales, "uint2", 16, codes.shape[1], halves=halves, offset_halves=offset_halves)


def gguf_q3_k(data: Tensor) -> WeightCodes:
    """Q3_K [N, K / 256 * 110]: 256 upper bits, 256 lower pairs, 16 scales of 6 bits (- 32) in 12 bytes, a half.

    Codes of 3 bits, - 4, in groups of 16.
    """
    blocks = gguf_rows(data, 110)
    high = torch.stack([blocks[..., :32] >> bit & 1 for bit in _BITS], -2).flatten(2)
    codes = (_pairs(blocks[..., 32:96]) | high << 2).flatten(1) ^ 4
    scales = _q3_scales(blocks[..., 96:108]).flatten(1)
    return WeightCodes(codes, scales, "int3", 16, codes.shape[1], halves=half_at(blocks, 108))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K's and Q5_K's 8 scales and 8 minima of 6 bits in 12 bytes, int8 [N, all groups] each."""
    low, high, mixed = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, mixed & 15 | low >> 6 << 4), -1)
    return _signed(scales), _signed(torch.cat((high & 63, mixed >> 4 | high >> 6 << 4), -1))


def _halves_of_32(packed: Tensor) -> Tensor:
    """Bytes [N, blocks, 128] → codes [N, blocks, 8, 32]: of each 32 bytes first the low halves, then the high ones."""
    packed = packed.unflatten(-1, (4, 1, 32))
    return torch.cat((packed & 15, packed >> 4), -2).flatten(2, 3)


def gguf_q4_k(data: Tensor) -> WeightCodes:
    """Q4_K [N, K / 256 * 144]: two halves, 8 scales and 8 minima of 6 bits in 12 bytes, 256 nibbles.

    weight = d * scale * code - dmin * minimum, in groups of 32.
    """
    blocks = gguf_rows(data, 144)
    nibbles, (scales, offsets) = _halves_of_32(blocks[..., 16:]).flatten(1), _six_bits(blocks[..., 4:16])
    halves = half_at(blocks, 0), -half_at(blocks, 2)
    return WeightCodes(join_nibbles(nibbles), scales, "uint4", 32, nibbles.shape[1], 1, offsets, *halves)


def gguf_q5_k(data: Tensor) -> WeightCodes:
    """Q5_K [N, K / 256 * 176]: as Q4_K, with 256 upper bits before the nibbles; kept as int6."""
    blocks = gguf_rows(data, 176)
    high = torch.stack([blocks[..., 16:48] >> bit & 1 for bit in _BITS], -2) << 4
    codes, (scales, offsets) = (
        (_halves_of_32(blocks[..., 48:]) | high).flatten(1),
        _six_bits(blocks[..., 4:16]),
    )
    halves = half_at(blocks, 0), -half_at(blocks, 2)
    return WeightCodes(codes, scales, "int6", 32, codes.shape[1], 1, offsets, *halves)


def gguf_q6_k(data: Tensor) -> WeightCodes:
    """Q6_K [N, K / 256 * 210]: 256 low nibbles, 256 upper pairs of bits, 16 int8 scales, a half.

    Codes of 6 bits, - 32, in groups of 16.
    """
    blocks = gguf_rows(data, 210)
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), -2).flatten(2)
    codes = ((low | _pairs(blocks[..., 128:192]) << 4) - 32).flatten(1)  # wraps around to two's complement
    scales, halves = _signed(blocks[..., 192:208]), half_at(blocks, 208)
    return WeightCodes(codes, scales, "int6", 16, codes.shape[1], halves=halves)


def _q3_scales(packed: Tensor) -> Tensor:
    """Low halves of 8 bytes, then their high halves, are the lower 4 bits; 4 bytes hold 16 upper pairs."""
    low = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), -1)
    high = torch.cat([packed[..., 8:] >> shift & 3 for shift in _PAIRS], -1)
    return (low | high << 4).to(torch.int8) - 32


def _pairs(packed: Tensor) -> Tensor:
    """2-bit codes [N, blocks, 64] → [N, blocks, 256]: of each 32 bytes first all lowest pairs, then the next."""
    halves = packed.unflatten(-1, (2, 1, 32))
    return torch.cat([halves >> shift & 3 for shift in _PAIRS], -2).flatten(2)


def gguf_mxfp4(data: Tensor) -> WeightCodes:
    """32 weights: an exponent, then 16 bytes. ggml's numbers are twice e2m1's and its exponents one less."""
    blocks = gguf_rows(data, 17)
    nibbles = _halves_of_16(blocks[..., 1:]).flatten(1)
    scales = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu)
    return WeightCodes(join_nibbles(nibbles), scales, "fp4", 32, nibbles.shape[1])


def gguf_nvfp4(data: Tensor) -> WeightCodes:
    """NVFP4 [N, K / 64 * 36]: 4 e4m3 scales without a sign, then 4 times 8 bytes of 16 nibbles. NaN counts as 0."""
    blocks = gguf_rows(data, 36)
    packed = blocks[..., 4:].unflatten(-1, (4, 8))
    nibbles = torch.cat((packed & 15, packed >> 4), -1).flatten(1)
    scales = blocks[..., :4] & 127
    scales = torch.where(scales == 127, 0, scales).flatten(1).contiguous().view(torch.float8_e4m3fn)
    return WeightCodes(
        join_nibbles(nibbles), scales, "fp4", 16, nibbles.shape[1], factors=torch.ones(len(nibbles))
    )


def gguf_iq4_nl(data: Tensor) -> WeightCodes:
    """IQ4_NL [N, K / 32 * 18]: a half and 32 nibbles, which are places in a table."""
    blocks = gguf_rows(data, 18)
    nibbles = _halves_of_16(blocks[..., 2:]).flatten(1)
    return WeightCodes(join_nibbles(nibbles), half_at(blocks, 0), "nl4", 32, nibbles.shape[1])


def gguf_iq4_xs(data: Tensor) -> WeightCodes:
    """IQ4_XS [N, K / 256 * 136]: a half, 8 scales of 6 bits (- 32), upper pairs first, and nibbles as IQ4_NL's."""
    blocks = gguf_rows(data, 136)
    packed = blocks[..., 8:].unflatten(-1, (8, 16))
    nibbles = torch.cat((packed & 15, packed >> 4), -1).flatten(1)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(2)
    high = torch.stack([blocks[..., 2:4] >> shift & 3 for shift in _PAIRS], -1).flatten(2)
    scales = ((low | high << 4).to(torch.int8) - 32).flatten(1)
    return WeightCodes(join_nibbles(nibbles), scales, "nl4", 32, nibbles.shape[1], halves=half_at(blocks, 0))


def gguf_tq2_0(data: Tensor) -> WeightCodes:
    """TQ2_0 [N, K / 256 * 66]: 256 codes of 2 bits, of which 1 stands for 0, and a half."""
    blocks = gguf_rows(data, 66)
    codes, scales = _pairs(blocks[..., :64]).flatten(1), half_at(blocks, 64)
    return WeightCodes(codes, scales, "uint2", 256, codes.shape[1], zeros=torch.ones_like(scales, dtype=torch.int8))


def gguf_q2_0(data: Tensor) -> WeightCodes:
    """Q2_0 [N, K / 64 * 18]: a half and 64 codes of 2 bits, k after k, of which 1 stands for 0."""
    blocks = gguf_rows(data, 18)
    codes = torch.stack([blocks[..., 2:] >> shift & 3 for shift in _PAIRS], -1).flatten(1)
    scales = half_at(blocks, 0)
    return WeightCodes(codes, scales, "uint2", 64, codes.shape[1], zeros=torch.ones_like(scales, dtype=torch.int8))


GGUF_CODES: dict[str, Callable[[Tensor], WeightCodes]] = {
    **GRID_CODES,
    "IQ4_NL": gguf_iq4_nl,
    "IQ4_XS": gguf_iq4_xs,
    "MXFP4": gguf_mxfp4,
    "NVFP4": gguf_nvfp4,
    "Q2_0": gguf_q2_0,
    "Q2_K": gguf_q2_k,
    "Q3_K": gguf_q3_k,
    "Q4_0": gguf_q4_0,
    "Q4_1": gguf_q4_1,
    "Q4_K": gguf_q4_k,
    "Q5_0": gguf_q5_0,
    "Q5_1": gguf_q5_1,
    "Q5_K": gguf_q5_k,
    "Q6_K": gguf_q6_k,
    "Q8_0": gguf_q8_0,
    "TQ2_0": gguf_tq2_0,
}
"""Rows of raw blocks, uint8 [N, bytes], by ggml's name of the block type."""
