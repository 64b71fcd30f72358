"""Weights in Python → the C++ core's view of the same arrays, and the names of packed formats."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem.errors import KernelError
from tandem.formats.codes import Weight, WeightCodes, in_nibbles, in_odd_numbers

DEFAULT_GROUP = 32  # weights along K that share one scale in int8 and int4


def packable(weight: Tensor) -> Tensor:
    """Kernels read contiguous float32 or bfloat16 in CPU memory."""
    weight = (
        weight.detach() if weight.requires_grad else weight
    ).contiguous()  # a view takes as long as all else
    return weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()


def bias_of(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()


_SCALE_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e8m0fnu: "e8m0",
    torch.float8_e4m3fn: "e4m3",
}


def scale_type(w: WeightCodes) -> str:
    """The core's name for it."""
    if in_nibbles(w):
        return "nibbles16"
    if in_odd_numbers(w):
        return "odd8" if w.group == 32 else "odd16"
    if w.halves is not None:
        return "bytes8" if w.group == 32 else "bytes16"
    if w.scales.dtype not in _SCALE_TYPES:
        types = ", ".join(str(dtype) for dtype in _SCALE_TYPES)
        raise KernelError(f"scales cannot be {w.scales.dtype}: take one of {types}")
    return _SCALE_TYPES[w.scales.dtype]


def core_codes(w: WeightCodes) -> _core.Codes:
    """The core's view of the same arrays."""
    names = w.fmt, w.group, scale_type(w), w.block_rows
    scales = w.scales.view(torch.uint8) if w.scales.element_size() == 1 else w.scales
    return _core.Codes(w.codes, scales, w.offsets, *names, w.halves, w.offset_halves, w.zeros, w.factors)


def core_source(weight: Weight) -> _core.Codes | Tensor:
    return core_codes(weight) if isinstance(weight, WeightCodes) else packable(weight)


def made_here(fmt: str, group: int) -> _core.WeightFormat:
    """Format in which numbers are packed: groups have bfloat16 scales, rows float32 ones."""
    return _core.WeightFormat(fmt, group, "bf16" if group else "f32")


FormatNames = tuple[str, int, str]
"""Format, group, scale type of a packed matrix."""

PanelLayout = tuple[str, int, int, int, int, int, int, str, int, int]
"""format, columns, depth, padded depth, panels, panel bytes, offset of the scales, their type ("f16", "f16+zeros",
"bytes8+offsets"), group, offset of the zero points or offsets."""


def floats_of(data: memoryview) -> Tensor:
    """A copy of float32 bytes, which may be none."""
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data.nbytes else torch.empty(0)
