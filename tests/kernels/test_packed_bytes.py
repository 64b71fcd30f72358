"""What every stored format takes once it is packed, beside what it takes in its file: decoding reads those bytes."""

from __future__ import annotations

import gguf
import pytest
import torch

import kernel_cases as cases
from tandem.formats import codes as stored_codes
from tandem.formats.codes import WeightCodes
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.packed import unsigned
from tandem.formats.quant_format import GGUF_FILE_BYTES, QuantFormat
from tandem.formats.reference import stored
from tandem.kernels.cpu import PackedMatrix

ROWS, DEPTH = 32, 4096
ROW_BYTES = 8  # what is kept once per row: nvfp4's factor, a scale; and panels end on a cache line

# bytes per weight: packed, in the file
STATED = {
    "mxfp4": (QuantFormat("mxfp4", "mxfp4", 32, 1, "U8"), 4.25, 4.25),
    "mxfp8": (QuantFormat("mxfp8", "fp8", 32, 1, "F8_E8M0"), 8.25, 8.25),
    "nvfp4": (QuantFormat("nvfp4", "modelopt", 16, 1, "F8_E4M3"), 4.5, 4.5),
    "fp8 128x128": (QuantFormat("fp8", "fp8", 128, 128, "F32"), 8.25, 8 + 32 / 128**2),
    "int4 g32, bf16": (QuantFormat("int4", "compressed-tensors", 32, 1, "BF16"), 4.5, 4.5),
    "gptq g128": (QuantFormat("int4", "gptq", 128, 1, "F16", True), 4.1875, 4.15625),
    "awq g32": (QuantFormat("int4", "awq", 32, 1, "F16", True), 4.75, 4.625),
    "int8 g128 with zeros": (QuantFormat("int8", "gptq", 128, 1, "F16", True), 8.1875, 8.1875),
}
GGUF_PACKED_BITS = {
    "q4_0": 4.5, "q4_1": 5.0, "q5_0": 6.5, "q5_1": 7.0, "q8_0": 8.5,
    "q2_k": 2.625, "q3_k": 3.5625, "q4_k": 4.625, "q5_k": 6.625, "q6_k": 6.5625,
    "iq4_nl": 4.5, "iq4_xs": 4.3125, "tq2_0": 2.09375, "iq2_xxs": 2.1875, "iq2_xs": 2.3125, "iq2_s": 2.5625,
    "iq3_xxs": 3.1875, "iq3_s": 3.4375, "iq1_s": 1.6875, "iq1_m": 1.8125,
}  # fmt: skip


def codes_of(name: str) -> WeightCodes:
    weight = torch.randn(ROWS, DEPTH)
    if name in ("mxfp4", "mxfp8", "nvfp4"):
        return stored(weight, name)
    if name.startswith("fp8"):
        return stored(weight, "fp8", 128)
    if name.startswith("int4"):
        made = stored(weight, "int4_zeros", 32)
        return WeightCodes(made.codes, made.scales.bfloat16(), "int4", 32, DEPTH)
    group = 32 if "g32" in name else 128
    scales = torch.rand(ROWS, DEPTH // group).half()
    zeros = torch.randint(1, 16, scales.shape, dtype=torch.uint8)
    if name.startswith("int8"):
        made = unsigned(
            torch.randint(0, 256, (ROWS, DEPTH), dtype=torch.uint8), 8, scales, zeros, group, DEPTH
        )
        assert isinstance(made, WeightCodes)
        return made
    nibbles = torch.randint(0, 256, (ROWS, DEPTH // 2), dtype=torch.uint8)
    return stored_codes.int4_zeros(nibbles, scales, zeros, group)


def packed_bits(codes: WeightCodes) -> float:
    matrix = PackedMatrix.from_codes(cases.workspace_of("scalar"), codes)
    return matrix.packed_bytes * 8 / (ROWS * DEPTH)


@pytest.mark.parametrize("name", STATED)
def test_bytes_per_weight(name: str) -> None:
    fmt, packed, file = STATED[name]
    assert fmt.bytes_per_weight * 8 == packed
    assert fmt.file_bytes_per_weight * 8 == file
    assert 0 <= packed_bits(codes_of(name)) - packed <= ROW_BYTES * 8 / DEPTH


@pytest.mark.parametrize("kind", GGUF_PACKED_BITS)
def test_bytes_per_weight_of_gguf(kind: str) -> None:
    fmt = QuantFormat(kind, "gguf")
    weights, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    assert fmt.file_bytes_per_weight == GGUF_FILE_BYTES[kind] == block_bytes / weights
    assert fmt.bytes_per_weight * 8 == GGUF_PACKED_BITS[kind]
    raw = torch.zeros(ROWS, DEPTH // weights * block_bytes, dtype=torch.uint8)
    assert packed_bits(GGUF_CODES[kind.upper()](raw)) == GGUF_PACKED_BITS[kind]
