"""Detects how a matrix is stored, from the names, types and shapes of its parts; the configuration only breaks ties.

`detect` reads headers alone, so every matrix of a checkpoint can be checked when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.checkpoint.parts import Part, Parts, codes_part
from tandem.checkpoint.quant_hints import QuantHints
from tandem.checkpoint.scaling import E8M0, Scaling, as_numbers, groups_of, scaling
from tandem.errors import CheckpointError
from tandem.formats import codes, packed
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat

Shape = tuple[int, int]
Tensors = Callable[[str], Tensor]  # role → the mapped tensor
FLOATS = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix [N, K] and how to read it."""

    format: QuantFormat
    shape: Shape
    read: Callable[[Tensors], Weight]


def detect(parts: Parts, hints: QuantHints, shape: Shape | None = None) -> Stored:
    """`shape`: the [N, K] that the model implies; None when only the parts' agreement is checked.

    CheckpointError names the tensor and what is wrong: an unknown type, a missing scale, a shape that does not fit.
    """
    part = codes_part(parts)
    if part is None:
        raise CheckpointError(f"{next(iter(parts.values())).name} lies beside no weight")
    if "qweight" in parts:
        return _words(parts, hints, shape)
    if "packed" in parts and part.dtype == "I32":
        return _compressed_ints(parts, hints, shape)
    if part.dtype in FLOATS:
        return _plain(parts, part, shape)
    reader = {"F8_E4M3": _fp8, "I8": _int8, "U8": _fp4}.get(part.dtype)
    if reader is None:
        raise part.wrong(
            f"is stored as {part.dtype}; readable are BF16, F16, F32, F8_E4M3, I8, U8, I32 words of int4"
        )
    return reader(parts, part, hints, shape)


def _plain(parts: Parts, part: Part, shape: Shape | None) -> Stored:
    if "scale" in parts:
        raise part.wrong(
            f"is {part.dtype}, but {parts['scale'].name} lies beside it: one of them is a leftover"
        )
    return Stored(QuantFormat(FLOATS[part.dtype]), _agreed(part, part.shape, shape), lambda t: t("weight"))


def _fp8(parts: Parts, part: Part, hints: QuantHints, shape: Shape | None) -> Stored:
    n, k = _agreed(part, part.shape, shape)
    scale = needed(parts, "scale", hints)
    if scale.dtype in E8M0 and scale.shape == (n, -(-k // 32)):
        found = QuantFormat("mxfp8", "fp8", 32, 1, scale.dtype)
        return Stored(found, (n, k), lambda t: codes.mxfp8(t("weight"), t("scale")))
    s = scaling(scale, (n, k), hints)
    found = QuantFormat("fp8", "fp8", s.group, s.block_rows, scale.dtype)
    return Stored(found, (n, k), lambda t: _fp8_codes(t("weight"), as_numbers(t("scale")), s))


def _fp8_codes(weight: Tensor, scale: Tensor, s: Scaling) -> Weight:
    if s.group == 0:
        return codes.fp8_channels(weight, scale)
    return packed.fitted(codes.fp8_blocks(weight, scale, (s.block_rows, s.group)))


def _int8(parts: Parts, part: Part, hints: QuantHints, shape: Shape | None) -> Stored:
    """int8; or two codes of 4 bits per byte: MXFP4 (DeepSeek-V4's experts), int4 (w4afp8)."""
    scale = needed(parts, "scale", hints)
    if scale.dtype in E8M0 or _is_halved(part, shape):
        return _fp4(parts, part, hints, shape)
    n, k = _agreed(part, part.shape, shape)
    s = scaling(scale, (n, k), hints)
    found = QuantFormat("int8", "compressed-tensors", s.group, s.block_rows, scale.dtype, "zeros" in parts)
    return Stored(found, (n, k), lambda t: _int8_codes(t, s, "zeros" in parts))


def _int8_codes(t: Tensors, s: Scaling, has_zeros: bool) -> Weight:
    stored = t("weight").contiguous().view(torch.uint8)
    zeros = s.matrix(t("zeros")).to(torch.int16) + 128 if has_zeros else None
    return packed.unsigned(stored ^ 128, 8, s.matrix(as_numbers(t("scale"))), zeros, s.group)


def _is_halved(part: Part, shape: Shape | None) -> bool:
    return shape is not None and part.shape == (shape[0], shape[1] // 2)


def _fp4(parts: Parts, part: Part, hints: QuantHints, shape: Shape | None) -> Stored:
    """Two codes per byte: e2m1 with e8m0 scales (MXFP4) or e4m3 ones (NVFP4), or int4 with numbers for scales."""
    role = next(r for r in ("weight", "packed", "blocks") if r in parts)
    scale = needed(parts, "scale", hints)
    width = 1
    for size in part.shape[1:]:
        width *= size
    n, k = _agreed(part, (*part.shape[:1], 2 * width), shape)
    if scale.dtype in E8M0:
        _expect(scale, (n, groups_of(k, 32)))
        found = QuantFormat("mxfp4", "mxfp4", 32, 1, scale.dtype)
        return Stored(found, (n, k), lambda t: codes.mxfp4(t(role), t("scale")))
    if scale.dtype == "F8_E4M3":
        return _nvfp4(parts, role, scale, (n, k), hints)
    if part.dtype != "I8":
        raise scale.wrong(f"is {scale.dtype}: 4-bit codes beside it need scales of U8, F8_E8M0 or F8_E4M3")
    s = scaling(scale, (n, k), hints)
    found = QuantFormat("int4", "w4afp8", s.group, s.block_rows, scale.dtype)
    return Stored(found, (n, k), lambda t: _int4_bytes(t, s, k))


def _int4_bytes(t: Tensors, s: Scaling, depth: int) -> Weight:
    stored = t("weight").contiguous().view(torch.uint8)
    return packed.signed(stored, 4, s.matrix(as_numbers(t("scale"))), s.group, depth)


def _nvfp4(parts: Parts, role: str, scale: Part, shape: Shape, hints: QuantHints) -> Stored:
    """ModelOpt multiplies by `weight_scale_2`, compressed-tensors divides by `weight_global_scale`."""
    _expect(scale, (shape[0], groups_of(shape[1], 16)))
    if "divisor" not in parts:
        _expect_one(needed(parts, "multiplier", hints))
        found = QuantFormat("nvfp4", "modelopt", 16, 1, scale.dtype)
        return Stored(
            found, shape, lambda t: codes.nvfp4(t(role), t("scale"), t("multiplier").float().reshape(()))
        )
    _expect_one(parts["divisor"])
    found = QuantFormat("nvfp4", "compressed-tensors", 16, 1, scale.dtype)
    return Stored(
        found,
        shape,
        lambda t: codes.nvfp4(t(role), t("scale").float() / t("divisor").float().reshape(()), 1.0),
    )


def _compressed_ints(parts: Parts, hints: QuantHints, shape: Shape | None) -> Stored:
    """compressed-tensors' pack-quantized: words along K; zero points packed along N."""
    part, scale = parts["packed"], needed(parts, "scale", hints)
    along_rows = parts["zeros"].shape[0] if "zeros" in parts else 0
    bits, (n, k) = _word_bits(part, (part.shape[0], part.shape[-1]), along_rows, hints, shape)
    order = "order" in parts
    s = scaling(scale, (n, k), hints)
    if "zeros" in parts:
        _expect(parts["zeros"], (-(-n * bits // 32), scale.shape[-1]))
    found = QuantFormat(
        f"int{bits}", "compressed-tensors", s.group, s.block_rows, scale.dtype, "zeros" in parts, order
    )
    return Stored(found, (n, k), lambda t: _read_words(t, bits, (n, k), s, parts))


def _read_words(t: Tensors, bits: int, shape: Shape, s: Scaling, parts: Parts) -> Weight:
    n, k = shape
    if "shape" in parts and tuple(t("shape").tolist()) != shape:
        raise parts["shape"].wrong(f"says {tuple(t('shape').tolist())}, but config.json implies {shape}")
    scales = s.matrix(as_numbers(t("scale")))
    if bits == 4 and not {"zeros", "order"} & set(parts):  # the common case needs no unpacking
        stored = t("packed").contiguous().view(torch.uint8)[:, : -(-k // 2)] ^ 0x88
        return packed.signed(stored, 4, scales, s.group, k)
    zeros = packed.packed_codes(t("zeros").T, bits, n).T if "zeros" in parts else None
    words = packed.packed_codes(t("packed"), bits, k)
    return _grouped(words, bits, scales, zeros, s.group, t, parts)


def _words(parts: Parts, hints: QuantHints, shape: Shape | None) -> Stored:
    """GPTQ (words along K, [K / 8, N]) or AWQ (words along N, [K, N / 8]): scales [groups, N] tell them apart."""
    part, scale, zeros = parts["qweight"], needed(parts, "scale", hints), needed(parts, "zeros", hints)
    if len(part.shape) != 2 or len(scale.shape) != 2:
        raise part.wrong(f"has shape {part.shape} beside scales {scale.shape}; both must have two dimensions")
    awq = part.shape[1] * 8 == scale.shape[1]
    if awq:
        bits, (k, n) = 4, (part.shape[0], part.shape[1] * 8)
        _agreed(part, (n, k), shape)
    else:
        transposed = (part.shape[1], part.shape[0])
        bits, (n, k) = _word_bits(part, transposed, zeros.shape[-1], hints, shape)
    group = scaling(scale, (n, k), hints, transposed=True).group
    _expect(zeros, (scale.shape[0], -(-n * bits // 32)))
    found = QuantFormat(
        f"int{bits}", "awq" if awq else "gptq", group, 1, scale.dtype, True, not awq and "order" in parts
    )
    if awq:
        return Stored(found, (n, k), lambda t: _read_awq(t, group))
    return Stored(found, (n, k), lambda t: _read_gptq(t, bits, (n, k), group, hints, parts))


def _read_awq(t: Tensors, group: int) -> Weight:
    zeros = packed.awq_codes(t("zeros"))
    return packed.unsigned(packed.awq_codes(t("qweight")), 4, t("scale").T, zeros, group)


def _read_gptq(t: Tensors, bits: int, shape: Shape, group: int, hints: QuantHints, parts: Parts) -> Weight:
    n, k = shape
    words = t("zeros")
    offset = {1: 1, 2: 0}.get(hints.gptq_version, -1)
    if offset < 0:
        offset = _gptq_offset(words, bits, parts["zeros"], hints)
    zeros = packed.gptq_zeros(words, bits, n, offset)
    return _grouped(packed.gptq_codes(t("qweight"), bits, k), bits, t("scale").T, zeros, group, t, parts)


def _gptq_offset(words: Tensor, bits: int, part: Part, hints: QuantHints) -> int:
    """Symmetric checkpoints tell their version: all zero points are the middle, stored as it is or less 1."""
    stored = words.contiguous().view(torch.uint8)
    for offset, same in ((1, 0x77 if bits == 4 else 0x7F), (0, 0x88 if bits == 4 else 0x80)):
        if bool((stored == same).all()):
            return offset
    raise part.wrong(
        f"may be stored less 1 or not: say which in {hints.where}.checkpoint_format, "
        f'"gptq" (less 1; most files) or "gptq_v2"; try "gptq"'
    )


def _grouped(
    stored: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, group: int, t: Tensors, parts: Parts
) -> Weight:
    """Groups in order, or act-order's."""
    if "order" not in parts:
        return packed.unsigned(stored, bits, scales, zeros, group)
    order, depth, count = t("order").long(), stored.shape[1], scales.shape[1]
    if order.shape != (depth,) or int(order.min()) < 0 or int(order.max()) >= count:
        raise parts["order"].wrong(f"must hold the group, 0 to {count - 1}, of each of {depth} inputs")
    if torch.equal(order, torch.arange(depth) // (group or depth)):
        return packed.unsigned(stored, bits, scales, zeros, group)
    return packed.reordered(stored, scales, zeros, bits, order)


def _word_bits(
    part: Part, words: Shape, along_rows: int, hints: QuantHints, shape: Shape | None
) -> tuple[int, Shape]:
    """(bits, [N, K]) of int32 words [N, K / (32 / bits)]. `along_rows`: how many words N zero points take, or 0."""
    n, width = words
    if shape is None:
        bits = next((b for b in (4, 8) if along_rows == -(-n * b // 32)), hints.bits or 4)
        return bits, (n, width * 32 // bits)
    for bits in (4, 8):
        if (n, width) == (shape[0], -(-shape[1] * bits // 32)):
            return bits, shape
    raise part.wrong(f"has shape {part.shape}, but config.json implies a matrix of {shape} in 4 or 8 bits")


def needed(parts: Parts, role: str, hints: QuantHints) -> Part:
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


def _agreed(part: Part, found: tuple[int, ...], wanted: Shape | None) -> Shape:
    if len(found) != 2 or (wanted is not None and found != wanted):
        implied = f"config.json implies {wanted}" if wanted else "a matrix has two dimensions"
        stands = "" if found == part.shape else f", which stands for {found}"
        raise part.wrong(f"has shape {part.shape}{stands}, but {implied}")
    return found[0], found[1]


def _expect(part: Part, shape: tuple[int, ...]) -> None:
    if part.shape != shape:
        raise part.wrong(f"has shape {part.shape}; its weight implies {shape}")


def _expect_one(part: Part) -> None:
    if part.shape not in ((), (1,), (1, 1)):
        raise part.wrong(f"has shape {part.shape}; it must be one number")
