"""`StoredMatrix`: a matrix that was recognised, and the checks that recognising it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem.checkpoint.parts import Parts, TensorPart, codes_part
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat

Shape = tuple[int, int]
Tensors = Callable[[str], Tensor]  # role → the mapped tensor
FLOATS = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [N, K] and how to read it."""

    format: QuantFormat
    shape: Shape
    read: Callable[[Tensors, Shape], Weight]  # of all tensors, or of the same part of each: then the shape is its own


def needed(parts: Parts, role: str) -> TensorPart:
    """The part of that role, or an error that says which tensor is missing."""
    if role in parts:
        return parts[role]
    part = codes_part(parts)
    assert part is not None
    names = {
        "scale": "weight_scale_inv, weight_scale or scale", "multiplier": "weight_scale_2", "zeros": "qzeros",
    }  # fmt: skip
    raise part.wrong(
        f"is {part.dtype}, but its {names[role]} is missing: copy the checkpoint again, all files"
    )


def agreed(part: TensorPart, shape: tuple[int, ...], expected: Shape | None) -> Shape:
    if len(shape) != 2 or (expected is not None and shape != expected):
        implied = f"config.json implies {expected}" if expected else "a matrix has two dimensions"
        note = "" if shape == part.shape else f", which stands for {shape}"
        raise part.wrong(f"has shape {part.shape}{note}, but {implied}")
    return shape[0], shape[1]


def expect(part: TensorPart, shape: tuple[int, ...], *dtypes: str) -> None:
    """CheckpointError unless the part has this shape and one of these types; none: any."""
    if part.shape != shape:
        raise part.wrong(f"has shape {part.shape}; its weight implies {shape}")
    if dtypes and part.dtype not in dtypes:
        raise part.wrong(f"is {part.dtype}; it must be {' or '.join(dtypes)}")


def expect_one(part: TensorPart) -> None:
    if part.shape not in ((), (1,), (1, 1)) or part.dtype not in FLOATS:
        raise part.wrong(f"is {part.dtype} of shape {part.shape}; it must be one number")
