"""How CUDA kernels take packed codes (`panels.py`) to tensor cores, 32 k of 16 columns at a time, and what else they
have in common. One place for each format.

Two codes become a pair of bfloat16 in registers, exactly, as operands of `mma.m16n8k16`: a panel's 16 columns are its
rows, up to 8 rows of x its columns. Products are exact and sums float32; what is summed over 32 k is scaled on its own.
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.formats.gpu_reading import (
    MMA_CODES,
    MMA_SCALES,
    MMA_STEP,
    PLAIN_CODES,
    is_plain_steps,
    takes_tensor_cores,
)
from tandem.kernels.gpu.nvrtc import cuda_source
from tandem.kernels.gpu.panels import Panels

STEP = MMA_STEP
NO_SCALE = "none"
FORMATS = {name: number for number, name in enumerate((*MMA_CODES, PLAIN_CODES))}  # the source compares these numbers
SCALES = {name: number for number, name in enumerate((*MMA_SCALES, NO_SCALE))}
SCALE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "e8m0": 1, NO_SCALE: 0}

SOURCE = cuda_source(__file__)


class Kind(NamedTuple):
    """Kind of codes that kernels are compiled for."""

    fmt: str
    scale: str
    grouped: bool  # a scale for every group of k, else one per row


def kind_of(panels: Panels) -> Kind:
    return Kind(panels.fmt, panels.scale if panels.scale_offset else NO_SCALE, panels.group > 0)


def has_steps(panels: Panels) -> bool:
    """Whether there is code for such panels."""
    codes = panels.fmt, panels.scales, panels.group, panels.depth, panels.padded_depth
    return panels.scale_offset > 0 and takes_tensor_cores(*codes)


def has_plain_steps(panels: Panels) -> bool:
    """True for panels of bfloat16 itself, which `code_product` alone multiplies."""
    return is_plain_steps(panels.fmt, panels.depth, panels.padded_depth)


def group_shift(panels: Panels) -> int:
    """2^this steps have one scale."""
    return max(0, (panels.group // STEP).bit_length() - 1)


def code_steps(kind: Kind) -> str:
    """The source to put before that of kernels."""
    constants = {
        "FORMAT": FORMATS[kind.fmt], "SCALE": SCALES[kind.scale], "GROUPED": int(kind.grouped),
        "GROUP_BYTES": 16 * SCALE_BYTES[kind.scale],
    }  # fmt: skip
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + SOURCE
