"""Bit orders of checkpoints → `WeightCodes`: compressed-tensors, GPTQ, AWQ. Nothing is rounded.

int32 words hold their codes from the low bits up. So on a little-endian machine a word's bytes already are codes in
order. Codes of 4 bits have the even index in the low half, as in `WeightCodes`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tandem.formats.codes import Weight, WeightCodes, int4_zeros, kept_scales, split_nibbles
from tandem.formats.reference import decoded

GROUPS = (256, 128, 64, 32, 16)  # along K, that kernels take
# column, within its 8, that a word's nibble i holds (AutoAWQ's gemm layout)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LOW_NIBBLES = 0x0F0F0F0F


def word_bytes(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, words] → uint8 [rows, count], or for 4 bits [rows, ceil(count / 2)]: unsigned codes as `WeightCodes`
    joins them."""
    return words.contiguous().view(torch.uint8)[:, : -(-count * bits // 8)]


def single_codes(joined: Tensor, bits: int, count: int) -> Tensor:
    """Codes that `word_bytes` returned, one per byte [rows, count]."""
    return split_nibbles(joined, count) if bits == 4 else joined


def signed(codes: Tensor, bits: int, scales: Tensor, group: int, depth: int) -> Weight:
    """Codes [N, K or K / 2] of 4 or 8 bits in two's complement, scales [N or 1, groups]: symmetric."""
    rows = codes.shape[0] if scales.shape[0] == 1 else 1
    weight = WeightCodes(codes.contiguous(), kept_scales(scales), f"int{bits}", group, depth, rows)
    return fitted(weight)


def unsigned(
    codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, group: int, depth: int
) -> Weight:
    """weight = (code - zero) * scale. codes as `word_bytes`; scales and zeros [N or 1, groups]; no zeros: the middle.

    Exact. Zero points all in the middle cost nothing; others are kept as bytes.
    """
    if zeros is None or bool((zeros == 1 << (bits - 1)).all()):
        return signed(codes ^ (0x88 if bits == 4 else 0x80), bits, scales, group, depth)
    if bits == 4:
        wide = zeros.expand(codes.shape[0], -1), scales.expand(codes.shape[0], -1)
        return fitted(int4_zeros(codes, wide[1], wide[0], group, depth))
    wide = zeros.to(torch.int16).expand(codes.shape[0], -1) - 128, scales.expand(codes.shape[0], -1)
    if bool((wide[0] > 127).any()):  # GPTQ's first version can say 256
        shifted = codes.to(torch.int16) - _spread(zeros.to(torch.int16), group, codes.shape)
        return shifted.float() * _spread(scales.float(), group, codes.shape)
    exact_scales, bytes_of_zeros = kept_scales(wide[1]), wide[0].to(torch.int8).contiguous()
    return fitted(WeightCodes((codes ^ 0x80).contiguous(), exact_scales, "int8", group, depth, zeros=bytes_of_zeros))


def fitted(codes: WeightCodes) -> Weight:
    """The same weights in a group that kernels take: larger groups are cut; odd ones end as float32."""
    if codes.group in GROUPS or (codes.group == 0 and codes.fmt in ("int8", "fp8")):
        return codes
    whole = codes.group or GROUPS[0] * -(-codes.depth // GROUPS[0])
    group = next((g for g in GROUPS if whole % g == 0), 0)
    return finer(codes, group, whole) if group else decoded(codes)


def finer(codes: WeightCodes, group: int, whole: int = 0) -> WeightCodes:
    """The same weights, of which `group` share a scale: scales are repeated, codes stay. whole: that do so now."""
    times = (whole or codes.group) // group

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return values.repeat_interleave(times, 1)[:, : -(-codes.depth // group)].contiguous()

    zeros, offsets, scales = spread(codes.zeros), spread(codes.offsets), spread(codes.scales)
    assert scales is not None
    return replace(codes, scales=scales, offsets=offsets, zeros=zeros, group=group)


def reordered(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, order: Tensor) -> Tensor:
    """Act-order: input k has the scale of group order[k], in no order. Float32, since such groups are no blocks."""
    zero = (1 << (bits - 1)) if zeros is None else zeros[:, order]
    return (single_codes(codes, bits, len(order)).float() - zero) * scales.float()[:, order]


def gptq_zeros(qzeros: Tensor, bits: int, columns: int, offset: int) -> Tensor:
    """int32 [groups, N / (32 / bits)] → [N, groups]; `offset` 1 for the first version, which stores zero - 1."""
    return (single_codes(word_bytes(qzeros, bits, columns), bits, columns).to(torch.int16) + offset).T


def awq_codes(words: Tensor) -> Tensor:
    """AWQ's int32 [K, N / 8], words along N in an order of their own → joined codes, uint8 [N, ceil(K / 2)].

    Works on whole words as long as it can: four bytes in one operation.
    """
    words = torch.nn.functional.pad(words, (0, 0, 0, words.shape[0] % 2))
    even, odd = (words[i::2].T.contiguous() for i in range(2))  # [N / 8, K / 2]
    low = even & _LOW_NIBBLES | (odd & _LOW_NIBBLES) << 4  # its byte i: nibble 2 i of both
    high = even >> 4 & _LOW_NIBBLES | odd & ~_LOW_NIBBLES
    joined = torch.empty(even.shape[0], 8, even.shape[1], dtype=torch.uint8)
    for nibble, column in enumerate(AWQ_ORDER):
        joined[:, column] = (high if nibble % 2 else low) >> 8 * (nibble // 2) & 255
    return joined.flatten(0, 1)


def _spread(values: Tensor, group: int, shape: torch.Size) -> Tensor:
    """[N or 1, groups] → [N or 1, K]."""
    return values.repeat_interleave(group or shape[1], 1)[:, : shape[1]]
