"""Bit orders of checkpoints → `WeightCodes`: compressed-tensors, GPTQ, AWQ. Nothing is rounded.

int32 words hold their codes from the low bits up, so on a little-endian machine a word's bytes already are codes in
order; 4-bit ones have the even index in the low half, as `WeightCodes` has.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tandem.formats.codes import Weight, WeightCodes, int4_zeros, join_nibbles, split_nibbles
from tandem.formats.reference import decoded

GROUPS = (256, 128, 64, 32, 16)  # along K, that kernels take
AWQ_ORDER = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # column, within its 8, that a word's nibble i holds (AutoAWQ's gemm layout)


def packed_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, words] → uint8 [rows, count], unsigned codes of 4 or 8 bits."""
    codes = words.contiguous().view(torch.uint8)
    return split_nibbles(codes, count) if bits == 4 else codes[:, :count]


def signed(codes: Tensor, bits: int, scales: Tensor, group: int, depth: int) -> Weight:
    """Codes [N, K or K / 2] of 4 or 8 bits in two's complement, scales [N or 1, groups]: symmetric."""
    kept = scales if scales.dtype is torch.bfloat16 else scales.float()
    rows = codes.shape[0] if scales.shape[0] == 1 else 1
    found = WeightCodes(codes.contiguous(), kept.contiguous(), f"int{bits}", group, depth, rows)
    return fitted(found)


def unsigned(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, group: int) -> Weight:
    """weight = (code - zero) * scale. codes uint8 [N, K]; scales and zeros [N or 1, groups]; no zeros: the middle.

    Exact. Zero points all in the middle cost nothing; others give 4-bit codes offsets and make 8-bit ones numbers.
    """
    middle = 1 << (bits - 1)
    if zeros is None or bool((zeros == middle).all()):
        flipped = codes ^ middle
        stored = join_nibbles(flipped) if bits == 4 else flipped
        return signed(stored, bits, scales, group, codes.shape[1])
    if bits == 4:
        wide = zeros.expand(codes.shape[0], -1), scales.expand(codes.shape[0], -1)
        return fitted(int4_zeros(join_nibbles(codes), wide[1], wide[0], group, codes.shape[1]))
    shifted = codes.to(torch.int16) - _spread(zeros.to(torch.int16), group, codes.shape)
    return shifted.float() * _spread(scales.float(), group, codes.shape)


def fitted(codes: WeightCodes) -> Weight:
    """The same weights in a group that kernels take: larger groups are cut; odd ones end as float32."""
    if codes.group in GROUPS or (codes.group == 0 and codes.fmt in ("int8", "fp8")):
        return codes
    whole = codes.group or GROUPS[0] * -(-codes.depth // GROUPS[0])
    group = next((g for g in GROUPS if whole % g == 0), 0)
    if not group:
        return decoded(codes)

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(whole // group, 1)[:, : -(-codes.depth // group)].contiguous()

    offsets = None if codes.offsets is None else spread(codes.offsets)
    return replace(codes, scales=spread(codes.scales), offsets=offsets, group=group)


def reordered(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, order: Tensor) -> Tensor:
    """Act-order: input k has the scale of group order[k], in no order. Float32, since such groups are no blocks."""
    zero = (1 << (bits - 1)) if zeros is None else zeros[:, order]
    return (codes.float() - zero) * scales.float()[:, order]


def gptq_codes(qweight: Tensor, bits: int, depth: int) -> Tensor:
    """GPTQ's int32 [K / (32 / bits), N]: words run along K. → uint8 [N, K]."""
    return packed_codes(qweight.T, bits, depth)


def gptq_zeros(qzeros: Tensor, bits: int, columns: int, offset: int) -> Tensor:
    """int32 [groups, N / (32 / bits)] → [N, groups]; `offset` 1 for the first version, which stores zero - 1."""
    return (packed_codes(qzeros, bits, columns).to(torch.int16) + offset).T


def awq_codes(words: Tensor) -> Tensor:
    """AWQ's int32 [rows, N / 8], words along N in an order of their own → uint8 [N, rows]."""
    nibbles = packed_codes(words, 4, 8 * words.shape[1]).unflatten(1, (-1, 8))
    plain = torch.empty_like(nibbles)
    plain[..., list(AWQ_ORDER)] = nibbles
    return plain.flatten(1).T.contiguous()


def _spread(values: Tensor, group: int, shape: torch.Size) -> Tensor:
    """[N or 1, groups] → [N or 1, K]."""
    return values.repeat_interleave(group or shape[1], 1)[:, : shape[1]]
