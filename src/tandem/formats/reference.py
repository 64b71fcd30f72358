"""Packed weight formats in plain torch: the codes and scales that csrc/format/pack.cc must produce.

int8: symmetric, scale = max|w| / 127. int4: codes -8 to 7, scale = (weight of the largest magnitude) / -8, which uses
all 16 codes. Scales of groups are bfloat16 (codes are made with the rounded scale), scales of rows float32.

fp8, mxfp8, mxfp4, nvfp4, codes with zero points, int6 and int3 come from checkpoints as codes and scales; `stored`
makes some for tests, `decoded` says what they mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import KernelError
from tandem.formats import codes as stored_codes
from tandem.formats import gguf_grids
from tandem.formats.codes import WeightCodes

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NL4_VALUES = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)  # fmt: skip
E4M3_MAX, E2M1_MAX = 448.0, 6.0
STORED = ("fp8", "mxfp8", "mxfp4", "nvfp4", "int4_zeros", "int2_zeros", "int6", "int3")


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
    if fmt in STORED:
        return decoded(stored(weight, fmt, group))
    if fmt not in ("int8", "int4"):
        known = ", ".join(("bf16", "f32", "int8", "int4", *STORED))
        raise KernelError(f"unknown weight format {fmt!r}; these exist: {known}")
    codes, scales = quantise(weight, fmt, group)
    return (codes * scales).flatten(1)[:, : weight.shape[1]].contiguous()


def _values(codes: WeightCodes) -> Tensor:
    """float32 [N, K]: every code's own number."""
    if codes.fmt in gguf_grids.FORMATS:
        return gguf_grids.grid_values(codes)
    single = stored_codes.codes_per_weight(codes)
    if codes.fmt == "fp8":
        return single.contiguous().view(torch.float8_e4m3fn).float()
    if codes.fmt == "fp4":
        return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])[single.long()]
    if codes.fmt == "nl4":
        return torch.tensor(NL4_VALUES)[single.long()]
    if codes.fmt in ("uint4", "uint2"):
        return single.float()
    bits = int(codes.fmt.removeprefix("int"))
    return ((single.int() + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)).float()


def decoded(codes: WeightCodes) -> Tensor:
    """The float32 [N, K] weights that codes and scales stand for."""
    weights = _values(codes) * _spread(codes, stored_codes.group_scales(codes))
    offsets = stored_codes.group_offsets(codes)
    return weights if offsets is None else weights + _spread(codes, offsets)


def _spread(codes: WeightCodes, groups: Tensor) -> Tensor:
    """[blocks of rows, groups] → [N, K] (or [N, 1] for one group)."""
    rows = groups.repeat_interleave(codes.block_rows, 0)[: codes.rows]
    return rows.repeat_interleave(codes.group, 1)[:, : codes.depth] if codes.group else rows


def magnitudes(codes: WeightCodes) -> Tensor:
    """Magnitudes that a product's errors are relative to: |code * scale| + |offset|, float32 [N, K]."""
    size = (_values(codes) * _spread(codes, stored_codes.group_scales(codes))).abs()
    offsets = stored_codes.group_offsets(codes)
    return size if offsets is None else size + _spread(codes, offsets).abs()


def _block_extremes(weight: Tensor, rows: int, columns: int) -> Tensor:
    """max|w| of every block, [ceil(N / rows), ceil(K / columns)]."""
    n, k = weight.shape
    padded = F.pad(weight.abs(), (0, -k % columns, 0, -n % rows))
    return padded.view(padded.shape[0] // rows, rows, -1, columns).amax((1, 3))


def _e2m1(scaled: Tensor) -> Tensor:
    """The nearest e2m1 codes, joined."""
    distance = (scaled.abs()[..., None] - torch.tensor(E2M1_VALUES)).abs()
    nibbles = distance.argmin(-1) + 8 * (scaled < 0)
    return stored_codes.join_nibbles(nibbles.to(torch.uint8))


def _per_weight(scales: Tensor, rows: int, columns: int, weight: Tensor) -> Tensor:
    spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight / spread[: weight.shape[0], : weight.shape[1]].clamp(min=2.0**-126)


def _stored_fp8(weight: Tensor, group: int) -> WeightCodes:
    rows, columns = (group, group) if group else (1, weight.shape[1])
    scales = _block_extremes(weight, rows, columns) / E4M3_MAX
    scaled = _per_weight(scales, rows, columns, weight).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn)
    if group:
        return stored_codes.fp8_blocks(codes, scales, (rows, columns))
    return stored_codes.fp8_channels(codes, scales)


def _stored_nvfp4(weight: Tensor) -> WeightCodes:
    scales = (_block_extremes(weight, 1, 16) / E2M1_MAX * 64).to(torch.float8_e4m3fn)
    return stored_codes.nvfp4(_e2m1(_per_weight(scales.float() / 64, 1, 16, weight)), scales, 1 / 64)


def _stored_mx(weight: Tensor, fmt: str) -> WeightCodes:
    largest = E4M3_MAX if fmt == "mxfp8" else E2M1_MAX
    exponents = torch.log2(_block_extremes(weight, 1, 32).clamp(min=2.0**-100) / largest).ceil()
    scaled, biased = _per_weight(exponents.exp2(), 1, 32, weight), (exponents + 127).to(torch.uint8)
    if fmt == "mxfp8":
        return stored_codes.mxfp8(scaled.to(torch.float8_e4m3fn), biased)
    return stored_codes.mxfp4(_e2m1(scaled), biased)


def _stored_zeros(weight: Tensor, group: int, bits: int) -> WeightCodes:
    """Codes from 0 on, from each group's smallest to its largest weight; the zero point is the code of 0."""
    padded = F.pad(weight, (0, -weight.shape[1] % group)).view(weight.shape[0], -1, group)
    low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
    top = (1 << bits) - 1
    scales = ((high - low) / top).clamp(min=2.0**-14).half()
    zeros = (-low / scales.float()).round().clamp(0, top)
    codes = ((padded / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top)
    nibbles = codes.flatten(1)[:, : weight.shape[1]].to(torch.uint8)
    if bits == 2:
        return WeightCodes(
            nibbles.contiguous(), scales, "uint2", group, weight.shape[1], zeros=zeros.to(torch.int8)
        )
    return stored_codes.int4_zeros(stored_codes.join_nibbles(nibbles), scales, zeros, group)


def _stored_signed(weight: Tensor, group: int, bits: int) -> WeightCodes:
    """Scales as halves, two's complement in a byte."""
    top = (1 << bits - 1) - 1
    groups = F.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / top).clamp(min=2.0**-14).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-top - 1, top).to(torch.int8)
    code_bytes = codes.flatten(1)[:, : weight.shape[1]].contiguous().view(torch.uint8)
    return WeightCodes(code_bytes, scales, f"int{bits}", group, weight.shape[1])


def stored(weight: Tensor, fmt: str, group: int = 128) -> WeightCodes:
    """weight [N, K] as a checkpoint of this format has it. fp8: blocks of group x group, or rows where group is 0."""
    weight = weight.float()
    if fmt == "fp8":
        return _stored_fp8(weight, group)
    if fmt in ("int6", "int3"):
        return _stored_signed(weight, group, int(fmt[-1]))
    if fmt.endswith("_zeros"):
        codes = _stored_zeros(weight, group, int(fmt[3]))
    else:
        codes = _stored_nvfp4(weight) if fmt == "nvfp4" else _stored_mx(weight, fmt)
    return replace(codes, depth=weight.shape[1])  # odd in tests only
