"""Quantised weights as checkpoints store them, in the one form that the kernels pack: codes and scales, unchanged.

Every function takes a checkpoint's own tensors and returns `WeightCodes`. Nothing is rounded and nothing widened: bytes
of scales and zero points stay bytes. What nvfp4's two scales stand for is their product in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NIBBLES = ("int4", "uint4", "fp4", "nl4")
SHARING = 256  # weights along K whose scales share a half


@dataclass(frozen=True, slots=True)
class WeightCodes:
    """A weight matrix [N, K]: weight = code * scale (+ offset), or (code - zero) * scale.

    codes: uint8 [N, K], or for 4 bits [N, ceil(K / 2)], even k in the low half. What a code is, `fmt` says: "int8",
    "int6", "int4" and "int3" (two's complement), "uint4" and "uint2" (from 0), "fp8" (OCP e4m3fn), "fp4" (OCP e2m1),
    "nl4" (GGUF's IQ4). Or 4 bytes for 8 weights, which `gguf_grids.py` describes: "iq2_xxs" and so on.
    scales: float32, bfloat16, float16 or float8_e8m0fnu [ceil(N / block_rows), ceil(K / group)], or [.., 1] where group
    is 0. Or float8_e4m3fn, times `factors`, float32 [ceil(N / block_rows)] (nvfp4). Or int8, times `halves`, float16
    [.., ceil(K / 256)] (GGUF's K-quants; groups of 16 or 32). Or uint8 (Q2_K): the low half times `halves` is the
    scale, the high half times `offset_halves` the offset. Or uint8 n (codebooks): (2 n + 1) / 8 times `halves`.
    offsets: None, or as scales, whose type they have; with `offset_halves`.
    zeros: None, or int8, of the scales' shape: the code that stands for 0.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    group: int
    depth: int  # K
    block_rows: int = 1
    offsets: Tensor | None = None
    halves: Tensor | None = None
    offset_halves: Tensor | None = None
    zeros: Tensor | None = None
    factors: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.rows, self.depth


Weight = Tensor | WeightCodes
"""A matrix [N, K] as a checkpoint holds it: float32, float16 or bfloat16 numbers, or codes."""

Blocks = tuple[Tensor, ...]
"""A matrix of numbers in several tensors [.., K] of one type, whose rows follow each other. Large ones are packed from
where they are: joining them would take as long as packing."""


def _bytes(codes: Tensor) -> Tensor:
    return codes.detach().contiguous().view(torch.uint8)


def _plain(scales: Tensor) -> Tensor:
    """fp8's scales in a type that kernels read and that holds them exactly."""
    scales = scales.detach()
    exact = scales.dtype in (torch.bfloat16, torch.float8_e8m0fnu)
    return scales.to(scales.dtype if exact else torch.float32).contiguous()


def kept_scales(scales: Tensor) -> Tensor:
    """Scales of integer codes likewise."""
    scales = scales.detach()
    exact = scales.dtype in (torch.bfloat16, torch.float16)
    return scales.to(scales.dtype if exact else torch.float32).contiguous()


def _exponents(scales: Tensor) -> Tensor:
    """e8m0 (uint8 or float8_e8m0fnu): 2^(code - 127); 255 is NaN."""
    return _bytes(scales).view(torch.float8_e8m0fnu)


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
    codes, scales = _bytes(codes), scale.detach().contiguous()
    factors = torch.as_tensor(global_scale).float().reshape(-1)[:1].repeat(codes.shape[0])
    return WeightCodes(codes, scales, "fp4", 16, 2 * codes.shape[1], factors=factors)


def int4_zeros(
    codes: Tensor, scale: Tensor, zeros: Tensor, group: int, depth: int | None = None
) -> WeightCodes:
    """weight = (code - zero) * scale. Codes 0 to 15 joined as `join_nibbles`; scale and zeros [N, ceil(K / group)]."""
    codes, scales = _bytes(codes), kept_scales(scale)
    depth = 2 * codes.shape[1] if depth is None else depth
    return WeightCodes(codes, scales, "uint4", group, depth, zeros=zeros.to(torch.int8).contiguous())


def join_nibbles(nibbles: Tensor) -> Tensor:
    """uint8 [N, K] of 0 to 15 → [N, ceil(K / 2)], even k in the low half."""
    nibbles = torch.nn.functional.pad(nibbles, (0, nibbles.shape[1] % 2))
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def split_nibbles(codes: Tensor, depth: int) -> Tensor:
    """The inverse of `join_nibbles`, [N, depth]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :depth]


def scale_tensors(codes: WeightCodes) -> dict[str, Tensor]:
    """Tensors that belong to the codes (scales, offsets, zero points, factors), by field; absent ones are left out."""
    fields = {
        "scales": codes.scales,
        "offsets": codes.offsets,
        "halves": codes.halves,
        "offset_halves": codes.offset_halves,
        "zeros": codes.zeros,
        "factors": codes.factors,
    }
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def in_nibbles(codes: WeightCodes) -> bool:
    """Whether a byte is a scale and an offset."""
    return codes.scales.dtype is torch.uint8 and not in_odd_numbers(codes)


def in_odd_numbers(codes: WeightCodes) -> bool:
    """Whether scales are odd numbers of eighths of a half."""
    return codes.fmt.startswith("iq")


def group_scales(codes: WeightCodes) -> Tensor:
    """float32 [blocks of rows, groups]."""
    values = codes.scales & 15 if in_nibbles(codes) else codes.scales
    if in_odd_numbers(codes):
        values = (2 * values.float() + 1) / 8
    scales = _times_halves(values, codes.halves, codes.group)
    return scales if codes.factors is None else scales * codes.factors[:, None]


def group_offsets(codes: WeightCodes) -> Tensor | None:
    """As `group_scales`; of zero points -zero * scale, which is exact for scales of 16 bits."""
    if codes.zeros is not None:
        return -codes.zeros.float() * group_scales(codes)
    if in_nibbles(codes):
        return _times_halves(codes.scales >> 4, codes.offset_halves, codes.group)
    return None if codes.offsets is None else _times_halves(codes.offsets, codes.offset_halves, codes.group)


def _times_halves(values: Tensor, halves: Tensor | None, group: int) -> Tensor:
    if halves is None:
        return values.float()
    shared = halves.float().repeat_interleave(SHARING // group, 1)[:, : values.shape[1]]
    return values.float() * shared


def codes_per_weight(codes: WeightCodes) -> Tensor:
    """uint8 [N, K]: one code each, whatever their width."""
    return split_nibbles(codes.codes, codes.depth) if codes.fmt in _NIBBLES else codes.codes
