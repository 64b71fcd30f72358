"""Integers packed into int32 words: compressed-tensors' pack-quantized, GPTQ, AWQ."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.checkpoint.parts import Parts, TensorPart
from tandem.checkpoint.quant_hints import QuantHints
from tandem.checkpoint.scaling import Scaling, as_numbers, scaling
from tandem.checkpoint.stored_matrix import Shape, StoredMatrix, Tensors, agreed, expect, needed
from tandem.formats import packed
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat


def compressed_ints(parts: Parts, hints: QuantHints, shape: Shape | None) -> StoredMatrix:
    """compressed-tensors' pack-quantized: words along K; zero points packed along N."""
    part, scale = parts["packed"], needed(parts, "scale")
    along_rows = parts["zeros"].shape[:1] if "zeros" in parts else ()
    bits, (n, k) = _word_bits(part, part.shape, along_rows, hints, shape)
    s = scaling(scale, (n, k), hints)
    if "zeros" in parts:
        expect(parts["zeros"], (-(-n * bits // 32), *scale.shape[1:]), "I32")
    if "shape" in parts:
        expect(parts["shape"], (2,), "I64", "I32")
    ordered = _expect_order(parts, k, hints)
    fmt = QuantFormat(
        f"int{bits}", "compressed-tensors", s.group, s.block_rows, scale.dtype, "zeros" in parts, ordered
    )
    return StoredMatrix(fmt, (n, k), lambda t, own: _read_words(_saying(t, (n, k), parts), bits, own, s, parts))


def _saying(t: Tensors, shape: Shape, parts: Parts) -> Tensors:
    """Tensors of a matrix of that shape. CheckpointError if they say another."""
    if "shape" in parts and tuple(t("shape").tolist()) != shape:
        raise parts["shape"].wrong(f"says {tuple(t('shape').tolist())}, but config.json implies {shape}")
    return t


def _read_words(t: Tensors, bits: int, shape: Shape, s: Scaling, parts: Parts) -> Weight:
    n, k = shape
    scales = s.matrix(as_numbers(t("scale")))
    zeros = packed.gptq_zeros(t("zeros").T, bits, n, 0) if "zeros" in parts else None
    words = packed.word_bytes(t("packed"), bits, k)
    return _grouped(words, bits, scales, zeros, (k, s.group), t, parts)


def gptq_or_awq(parts: Parts, hints: QuantHints, shape: Shape | None) -> StoredMatrix:
    """GPTQ (words along K, [K / 8, N]) or AWQ (words along N, [K, N / 8]): scales [groups, N] tell them apart."""
    part, scale, zeros = parts["qweight"], needed(parts, "scale"), needed(parts, "zeros")
    if len(part.shape) != 2 or len(scale.shape) != 2 or part.dtype != "I32":
        raise part.wrong(
            f"is {part.dtype} {part.shape}, its scales {scale.shape}; both must be matrices, words I32"
        )
    awq = part.shape[1] * 8 == scale.shape[1]
    if awq:
        bits, (k, n) = 4, (part.shape[0], part.shape[1] * 8)
        agreed(part, (n, k), shape)
    else:
        bits, (n, k) = _word_bits(part, part.shape[::-1], zeros.shape[1:], hints, shape)
    group = scaling(scale, (n, k), hints, transposed=True).group
    expect(zeros, (scale.shape[0], -(-n * bits // 32)), "I32")
    ordered = not awq and _expect_order(parts, k, hints)
    packing, shifted = "awq" if awq else "gptq", not hints.symmetric
    fmt = QuantFormat(f"int{bits}", packing, group, 1, scale.dtype, shifted, ordered)
    if awq:
        return StoredMatrix(fmt, (n, k), lambda t, own: _read_awq(t, group, own[1]))
    return StoredMatrix(fmt, (n, k), lambda t, own: _read_gptq(t, bits, own, group, hints, parts))


def _read_awq(t: Tensors, group: int, depth: int) -> Weight:
    zeros = packed.single_codes(packed.awq_codes(t("zeros")), 4, len(t("zeros")))
    return packed.unsigned(packed.awq_codes(t("qweight")), 4, t("scale").T, zeros, group, depth)


def _read_gptq(t: Tensors, bits: int, shape: Shape, group: int, hints: QuantHints, parts: Parts) -> Weight:
    n, k = shape
    words = t("zeros")
    offset = {1: 1, 2: 0}.get(hints.gptq_version, -1)
    if offset < 0:
        offset = _gptq_offset(words, bits, parts["zeros"], hints)
    zeros = packed.gptq_zeros(words, bits, n, offset)
    words = packed.word_bytes(t("qweight").T, bits, k)
    return _grouped(words, bits, t("scale").T, zeros, (k, group), t, parts)


def _gptq_offset(words: Tensor, bits: int, part: TensorPart, hints: QuantHints) -> int:
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
    words: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, along: Shape, t: Tensors, parts: Parts
) -> Weight:
    """Groups in order, or act-order's. `along`: (K, group)."""
    depth, group = along
    if "order" not in parts:
        return packed.unsigned(words, bits, scales, zeros, group, depth)
    order, count = t("order").long(), scales.shape[1]
    if depth and (int(order.min()) < 0 or int(order.max()) >= count):
        raise parts["order"].wrong(f"must hold the group, 0 to {count - 1}, of each of {depth} inputs")
    if torch.equal(order, torch.arange(depth) // (group or depth)):
        return packed.unsigned(words, bits, scales, zeros, group, depth)
    return packed.reordered(words, scales, zeros, bits, order)


def _expect_order(parts: Parts, depth: int, hints: QuantHints) -> bool:
    """Whether groups may be permuted: files without act-order have the same tensor, with groups in order."""
    if "order" not in parts:
        return False
    expect(parts["order"], (depth,), "I32", "I64")
    return hints.act_order is not False


def _word_bits(
    part: TensorPart, words: tuple[int, ...], along_rows: tuple[int, ...], hints: QuantHints, shape: Shape | None
) -> tuple[int, Shape]:
    """(bits, [N, K]) of int32 words [N, K / (32 / bits)]. `along_rows`: how many words N zero points take, if any."""
    n, width = agreed(part, words, None)
    if shape is None:
        bits = next((b for b in (4, 8) if along_rows == (-(-n * b // 32),)), hints.bits or 4)
        return bits, (n, width * 32 // bits)
    for bits in (4, 8):
        if (n, width) == (shape[0], -(-shape[1] * bits // 32)):
            return bits, shape
    raise part.wrong(f"has shape {part.shape}, but config.json implies a matrix of {shape} in 4 or 8 bits")
