"""Detects how a matrix is stored, from the names, types and shapes of its parts; the configuration only breaks ties.

`detect` reads headers alone, so every matrix of a checkpoint can be checked when it is opened.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.checkpoint.layout_words import compressed_ints, gptq_or_awq
from tandem.checkpoint.parts import Parts, TensorPart, codes_part
from tandem.checkpoint.quant_hints import QuantHints
from tandem.checkpoint.scaling import E8M0, Scaling, as_numbers, groups_of, scaling
from tandem.checkpoint.stored_matrix import (
    FLOATS,
    Shape,
    StoredMatrix,
    Tensors,
    agreed,
    expect,
    expect_one,
    needed,
)
from tandem.errors import CheckpointError
from tandem.formats import codes, packed
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat


def detect(parts: Parts, hints: QuantHints, shape: Shape | None = None) -> StoredMatrix:
    """`shape`: the [N, K] that the model implies; None when only the parts' agreement is checked.

    CheckpointError names the tensor and what is wrong: an unknown type, a missing scale, a shape that does not fit.
    """
    part = codes_part(parts)
    if part is None:
        raise CheckpointError(f"{next(iter(parts.values())).name} lies beside no weight")
    if "qweight" in parts:
        return gptq_or_awq(parts, hints, shape)
    if "packed" in parts and part.dtype == "I32":
        return compressed_ints(parts, hints, shape)
    if part.dtype in FLOATS:
        return _plain(parts, part, shape)
    reader = {"F8_E4M3": _fp8, "I8": _int8, "U8": _fp4}.get(part.dtype)
    if reader is None:
        raise part.wrong(
            f"is stored as {part.dtype}; readable are BF16, F16, F32, F8_E4M3, I8, U8, I32 words of int4"
        )
    return reader(parts, part, hints, shape)


def _plain(parts: Parts, part: TensorPart, shape: Shape | None) -> StoredMatrix:
    if "scale" in parts:
        raise part.wrong(
            f"is {part.dtype}, but {parts['scale'].name} lies beside it: one of them is a leftover"
        )
    return StoredMatrix(QuantFormat(FLOATS[part.dtype]), agreed(part, part.shape, shape), lambda t, _: t("weight"))


def _fp8(parts: Parts, part: TensorPart, hints: QuantHints, shape: Shape | None) -> StoredMatrix:
    n, k = agreed(part, part.shape, shape)
    scale = needed(parts, "scale")
    if scale.dtype in E8M0 and scale.shape == (n, -(-k // 32)):
        fmt = QuantFormat("mxfp8", "fp8", 32, 1, scale.dtype)
        return StoredMatrix(fmt, (n, k), lambda t, _: codes.mxfp8(t("weight"), t("scale")))
    s = scaling(scale, (n, k), hints)
    fmt = QuantFormat("fp8", "fp8", s.group, s.block_rows, scale.dtype)
    return StoredMatrix(fmt, (n, k), lambda t, _: _fp8_codes(t("weight"), as_numbers(t("scale")), s))


def _fp8_codes(weight: Tensor, scale: Tensor, s: Scaling) -> Weight:
    if s.group == 0:
        return codes.fp8_channels(weight, scale)
    return packed.fitted(codes.fp8_blocks(weight, scale, (s.block_rows, s.group)))


def _int8(parts: Parts, part: TensorPart, hints: QuantHints, shape: Shape | None) -> StoredMatrix:
    """int8; or two codes of 4 bits per byte: MXFP4 (DeepSeek-V4's experts), int4 (w4afp8)."""
    scale = needed(parts, "scale")
    if scale.dtype in E8M0 or _is_halved(part, hints, shape):
        return _fp4(parts, part, hints, shape)
    n, k = agreed(part, part.shape, shape)
    s = scaling(scale, (n, k), hints)
    if "zeros" in parts:
        expect(parts["zeros"], scale.shape, "I8")
    fmt = QuantFormat("int8", "compressed-tensors", s.group, s.block_rows, scale.dtype, "zeros" in parts)
    return StoredMatrix(fmt, (n, k), lambda t, _: _int8_codes(t, s, "zeros" in parts))


def _int8_codes(t: Tensors, s: Scaling, has_zeros: bool) -> Weight:
    stored = t("weight").contiguous().view(torch.uint8)
    zeros = s.matrix(t("zeros")).to(torch.int16) + 128 if has_zeros else None
    scales = s.matrix(as_numbers(t("scale")))
    return packed.unsigned(stored ^ 128, 8, scales, zeros, s.group, stored.shape[1])


def _is_halved(part: TensorPart, hints: QuantHints, shape: Shape | None) -> bool:
    """Two codes per byte: as the model's sizes say, or before those are known, as the configuration does."""
    if shape is None:
        return hints.method == "w4afp8"
    return part.shape == (shape[0], shape[1] // 2)


def _fp4(parts: Parts, part: TensorPart, hints: QuantHints, shape: Shape | None) -> StoredMatrix:
    """Two codes per byte: e2m1 with e8m0 scales (MXFP4) or e4m3 ones (NVFP4), or int4 with numbers for scales."""
    role = next(r for r in ("weight", "packed", "blocks") if r in parts)
    scale = needed(parts, "scale")
    n, k = agreed(part, (*part.shape[:1], 2 * math.prod(part.shape[1:])), shape)
    if scale.dtype in E8M0:
        expect(scale, (n, groups_of(k, 32)))
        fmt = QuantFormat("mxfp4", "mxfp4", 32, 1, scale.dtype)
        return StoredMatrix(fmt, (n, k), lambda t, _: codes.mxfp4(t(role), t("scale")))
    if scale.dtype == "F8_E4M3":
        return _nvfp4(parts, role, scale, (n, k))
    if part.dtype != "I8":
        raise scale.wrong(f"is {scale.dtype}: 4-bit codes beside it need scales of U8, F8_E8M0 or F8_E4M3")
    s = scaling(scale, (n, k), hints)
    fmt = QuantFormat("int4", "w4afp8", s.group, s.block_rows, scale.dtype)
    return StoredMatrix(fmt, (n, k), lambda t, own: _int4_bytes(t, s, own[1]))


def _int4_bytes(t: Tensors, s: Scaling, depth: int) -> Weight:
    stored = t("weight").contiguous().view(torch.uint8)
    return packed.signed(stored, 4, s.matrix(as_numbers(t("scale"))), s.group, depth)


def _nvfp4(parts: Parts, role: str, scale: TensorPart, shape: Shape) -> StoredMatrix:
    """ModelOpt multiplies by `weight_scale_2`, compressed-tensors divides by `weight_global_scale`."""
    expect(scale, (shape[0], groups_of(shape[1], 16)))
    if "divisor" not in parts:
        expect_one(needed(parts, "multiplier"))
        fmt = QuantFormat("nvfp4", "modelopt", 16, 1, scale.dtype)
        return StoredMatrix(
            fmt, shape, lambda t, _: codes.nvfp4(t(role), t("scale"), t("multiplier").float().reshape(()))
        )
    expect_one(parts["divisor"])
    fmt = QuantFormat("nvfp4", "compressed-tensors", 16, 1, scale.dtype)
    return StoredMatrix(
        fmt,
        shape,
        lambda t, _: codes.nvfp4(t(role), t("scale").float() / t("divisor").float().reshape(()), 1.0),
    )
