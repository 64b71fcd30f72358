"""Random matrices as codes, in every format that the GPU's dense kernels read."""

from __future__ import annotations

from functools import cache

import torch

from tandem.formats.codes import WeightCodes, join_nibbles
from tandem.formats.reference import quantise, stored

FORMATS = ["int8", "int8 rows", "int4", "int4 f16", "fp8", "fp8 rows", "mxfp8", "mxfp4", "nvfp4"]


@cache
def coded(columns: int, depth: int, fmt: str) -> WeightCodes:
    weight = torch.randn(columns, depth, generator=torch.Generator().manual_seed(1)) / depth**0.5
    kind, _, how = fmt.partition(" ")
    if not kind.startswith("int"):
        return stored(weight, kind, 0 if how else 128)
    codes, scales = quantise(weight, kind, 0 if how == "rows" else 32)
    bits = codes.flatten(1)[:, :depth].to(torch.int8).view(torch.uint8)
    kept = scales[..., 0] if how == "rows" else scales[..., 0].to(torch.float16 if how else torch.bfloat16)
    bits = join_nibbles(bits & 15) if kind == "int4" else bits
    return WeightCodes(bits.contiguous(), kept, kind, 0 if how == "rows" else 32, depth)
