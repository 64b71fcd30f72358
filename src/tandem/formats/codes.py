"""Quantised weights as checkpoints store them, in the one form that the kernels pack: codes and scales, unchanged.

Every function takes a checkpoint's own tensors and returns `WeightCodes`. Nothing is rounded: scales of 8 bits widen
to bfloat16, halves to float32; only nvfp4's two scales are multiplied, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.errors import KernelError

_NIBBLES = ("int4", "uint4", "fp4")
_GGUF_GROUP = 32  # weights per block of Q8_0 and Q4_0 (ggml-common.h)


@dataclass(frozen=True, slots=True)
class WeightCodes:
    """A weight matrix [N, K]: weight = code * scale, with "uint4" + offset.

    codes: uint8 [N, K], or for 4 bits [N, ceil(K / 2)], even k in the low half. What a code is, `fmt` says: "int8" and
    "int4" (two's complement), "uint4" (0 to 15), "fp8" (OCP e4m3fn), "fp4" (OCP e2m1).
    scales: float32 or bfloat16 [ceil(N / block_rows), ceil(K / group)], or [.., 1] where group is 0.
    offsets: for "uint4", float32 as scales, which are float32 too; otherwise None.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    group: int
    depth: int  # K
    block_rows: int = 1
    offsets: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.rows, self.depth


Weight = Tensor | WeightCodes
"""A matrix [N, K] as a checkpoint holds it: float32, float16 or bfloat16 numbers, or codes."""


def _bytes(codes: Tensor) -> Tensor:
    return codes.detach().contiguous().view(torch.uint8)


def _plain(scales: Tensor) -> Tensor:
    """Scales in a type that kernels read and that holds them exactly."""
    scales = scales.detach()
    exact = torch.bfloat16 if scales.dtype is torch.bfloat16 else torch.float32
    return scales.to(exact).contiguous()


def _wide(scales: Tensor) -> Tensor:
    return scales.detach().float().contiguous()


def _exponents(scales: Tensor) -> Tensor:
    """e8m0 (uint8 or float8_e8m0fnu): 2^(code - 127), all of which bfloat16 has; 255 is NaN."""
    bits = _bytes(scales).to(torch.int16) << 7
    bits = torch.where(bits == 0, 0x40, bits)  # 2^-127 is a subnormal
    return torch.where(bits == 255 << 7, 0x7FC0, bits).to(torch.int16).view(torch.bfloat16)


def fp8_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> WeightCodes:
    """DeepSeek's fp8: weight float8_e4m3fn [N, K], scale (`weight_scale_inv`) [ceil(N / rows), ceil(K / columns)]."""
    return WeightCodes(_bytes(weight), _plain(scale), "fp8", block[1], weight.shape[1], block[0])


def fp8_channels(weight: Tensor, scale: Tensor) -> WeightCodes:
    """weight float8_e4m3fn [N, K], scale of every output row ([N] or [N, 1]) or of the whole matrix (one number)."""
    block_rows = weight.shape[0] if scale.numel() == 1 else 1
    return WeightCodes(_bytes(weight), _plain(scale).reshape(-1, 1), "fp8", 0, weight.shape[1], block_rows)


def mxfp8(weight: Tensor, scale: Tensor) -> WeightCodes:
    """OCP MXFP8: weight float8_e4m3fn [N, K], scale e8m0 [N, ceil(K / 32)]."""
    return WeightCodes(_bytes(weight), _exponents(scale), "fp8", 32, weight.shape[1])


def mxfp4(codes: Tensor, scale: Tensor) -> WeightCodes:
    """OCP MXFP4: uint8 [N, K / 2] (or gpt-oss' blocks [N, K / 32, 16]), scale e8m0 [N, K / 32]."""
    codes = _bytes(codes).flatten(1)
    return WeightCodes(codes, _exponents(scale), "fp4", 32, 2 * codes.shape[1])


def nvfp4(codes: Tensor, scale: Tensor, global_scale: Tensor | float) -> WeightCodes:
    """NVFP4: uint8 [N, K / 2], scale float8_e4m3fn [N, K / 16], times one number of the whole matrix."""
    codes = _bytes(codes)
    return WeightCodes(codes, _plain(scale.float() * global_scale), "fp4", 16, 2 * codes.shape[1])


def int4_zeros(
    codes: Tensor, scale: Tensor, zeros: Tensor, group: int, depth: int | None = None
) -> WeightCodes:
    """weight = (code - zero) * scale. Codes 0 to 15 joined as `join_nibbles`; scale and zeros [N, ceil(K / group)].

    -zero * scale is exact in float32 for scales of 16 bits and zeros of up to 13.
    """
    codes, scales = _bytes(codes), _wide(scale)
    depth = 2 * codes.shape[1] if depth is None else depth
    return WeightCodes(codes, scales, "uint4", group, depth, offsets=-zeros.float() * scales)


def gguf_rows(data: Tensor, block_bytes: int) -> Tensor:
    """Rows of raw GGUF blocks, uint8 [N, bytes], as [N, blocks, block_bytes]."""
    if data.dim() != 2 or data.dtype is not torch.uint8 or data.shape[1] % block_bytes:
        raise KernelError(f"GGUF rows must be uint8 [N, blocks * {block_bytes}], not {list(data.shape)}")
    return data.view(data.shape[0], -1, block_bytes)


def half_at(blocks: Tensor, at: int) -> Tensor:
    """The half at byte `at` of every block, float32 [N, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def gguf_q8_0(data: Tensor) -> WeightCodes:
    """GGUF Q8_0 [N, K / 32 * 34]: a half and 32 int8 per block."""
    blocks = gguf_rows(data, 34)
    codes = blocks[..., 2:].flatten(1).contiguous()
    return WeightCodes(codes, half_at(blocks, 0).flatten(1), "int8", _GGUF_GROUP, codes.shape[1])


def gguf_q4_0(data: Tensor) -> WeightCodes:
    """GGUF Q4_0 [N, K / 32 * 18]: a half and 16 bytes per block; low halves are k 0 to 15, high ones 16 to 31, + 8."""
    blocks = gguf_rows(data, 18)
    packed = blocks[..., 2:]
    nibbles = torch.cat((packed & 15, packed >> 4), -1).flatten(1) ^ 8
    return WeightCodes(
        join_nibbles(nibbles), half_at(blocks, 0).flatten(1), "int4", _GGUF_GROUP, nibbles.shape[1]
    )


def gguf_q4_1(data: Tensor) -> WeightCodes:
    """GGUF Q4_1 [N, K / 32 * 20]: two halves and 16 bytes per block, in Q4_0's order; weight = d * code + m."""
    blocks = gguf_rows(data, 20)
    packed = blocks[..., 4:]
    nibbles = torch.cat((packed & 15, packed >> 4), -1).flatten(1)
    scales, offsets = half_at(blocks, 0).flatten(1), half_at(blocks, 2).flatten(1)
    return WeightCodes(join_nibbles(nibbles), scales, "uint4", _GGUF_GROUP, nibbles.shape[1], offsets=offsets)


def gguf_q4_k(data: Tensor) -> WeightCodes:
    """GGUF Q4_K [N, K / 256 * 144]: two halves, 8 scales and 8 minima of 6 bits in 12 bytes, 256 nibbles.

    weight = d * scale * code - dmin * minimum, in groups of 32 (ggml-common.h, block_q4_K).
    """
    blocks = gguf_rows(data, 144)
    low, high, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((low & 63, mixed & 15 | low >> 6 << 4), -1)
    minimum = torch.cat((high & 63, mixed >> 4 | high >> 6 << 4), -1)
    packed = blocks[..., 16:].unflatten(-1, (4, 1, 32))  # 64 weights: low halves, then high ones
    nibbles = torch.cat((packed & 15, packed >> 4), -2).flatten(1)
    scales, offsets = half_at(blocks, 0) * scale, -half_at(blocks, 2) * minimum
    codes = join_nibbles(nibbles)
    return WeightCodes(
        codes, scales.flatten(1), "uint4", _GGUF_GROUP, nibbles.shape[1], offsets=offsets.flatten(1)
    )


def gguf_q6_k(data: Tensor) -> WeightCodes:
    """GGUF Q6_K [N, K / 256 * 210]: 256 low nibbles, 256 upper pairs of bits, 16 int8 scales, a half.

    Codes of 6 bits, - 32, in groups of 16 (ggml-common.h, block_q6_K); they are kept as int8.
    """
    blocks = gguf_rows(data, 210)
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), -2).flatten(2)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(2)
    codes = ((low | high << 4) - 32).flatten(1)  # wraps around to two's complement
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * half_at(blocks, 208)
    return WeightCodes(codes, scales.flatten(1), "int8", 16, codes.shape[1])


def join_nibbles(nibbles: Tensor) -> Tensor:
    """uint8 [N, K] of 0 to 15 → [N, ceil(K / 2)], even k in the low half."""
    nibbles = torch.nn.functional.pad(nibbles, (0, nibbles.shape[1] % 2))
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def split_nibbles(codes: Tensor, depth: int) -> Tensor:
    """The inverse of `join_nibbles`, [N, depth]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :depth]


def codes_per_weight(codes: WeightCodes) -> Tensor:
    """uint8 [N, K]: one code each, whatever their width."""
    return split_nibbles(codes.codes, codes.depth) if codes.fmt in _NIBBLES else codes.codes
