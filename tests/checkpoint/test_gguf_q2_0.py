"""GGUF's Q2_0, which the `gguf` package does not know: llama.cpp's definition, written out."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import kernel_cases as cases
from gguf_files import finish
from tandem.checkpoint.gguf_file import GGUFFile
from tandem.errors import CheckpointError
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.quant_format import QuantFormat
from tandem.formats.reference import decoded, magnitudes
from tandem.kernels.cpu import PackedMatrix

ROWS, DEPTH, BLOCK, BYTES = 33, 512, 64, 18
NUMBER = 42  # GGML_TYPE_Q2_0


def random_blocks(rows: int = ROWS, block: int = BLOCK) -> np.ndarray:
    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (rows, DEPTH // block, 2 + block // 4), dtype=np.uint8)
    blocks[..., :2] = random.uniform(-1, 1, (rows, DEPTH // block, 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def by_definition(data: np.ndarray) -> torch.Tensor:
    """Weight i of a block is (code - 1) * half; its code is bits 2 * (i % 4) of byte i // 4."""
    numbers = np.zeros((len(data), DEPTH), np.float32)
    for row, blocks in enumerate(data.reshape(len(data), -1, BYTES)):
        for b, block in enumerate(blocks):
            half = np.float32(block[:2].copy().view(np.float16)[0])
            for i in range(BLOCK):
                numbers[row, b * BLOCK + i] = (float(block[2 + i // 4] >> 2 * (i % 4) & 3) - 1) * half
    return torch.from_numpy(numbers)


def written(path: Path, *matrices: np.ndarray) -> Path:
    """Written as bytes, whose type and width are then put right."""
    writer = gguf.GGUFWriter(path, "llama")
    for i, data in enumerate(matrices):
        writer.add_tensor(f"blk.{i}.ffn_down.weight", data.view(np.int8))
    raw = finish(writer, path).read_bytes()
    for data in matrices:
        rows, width = data.shape
        as_bytes = struct.pack("<IQQI", 2, width, rows, gguf.GGMLQuantizationType.I8)
        raw = raw.replace(as_bytes, struct.pack("<IQQI", 2, DEPTH, rows, NUMBER))
    path.write_bytes(raw)
    return path


def test_a_file_has_its_blocks(tmp_path: Path) -> None:
    data = random_blocks()
    file = GGUFFile(written(tmp_path / "model.gguf", data))
    [tensor] = file.tensors.values()
    assert (tensor.kind, tensor.shape, tensor.row_bytes) == ("Q2_0", (ROWS, DEPTH), DEPTH // BLOCK * BYTES)
    assert torch.equal(file.data(tensor).view(ROWS, -1), torch.from_numpy(data))


@pytest.mark.parametrize("tier", cases.TIERS)
def test_kernels_hold_its_weights_exactly(tier: str) -> None:
    cases.require_tier(tier)
    data = random_blocks()
    codes, expected = GGUF_CODES["Q2_0"](torch.from_numpy(data)), by_definition(data)
    assert torch.equal(decoded(codes), expected)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier), codes)
    assert torch.equal(matrix.dequantised(), expected)
    for rows in (3, 40):
        x = cases.activations(rows, DEPTH, "uint2")
        magnitude = x.double().abs() @ magnitudes(codes).double().T
        error = (matrix(x, torch.float32).double() - x.double() @ expected.double().T).abs()
        assert (error <= cases.product_bound(magnitude, DEPTH, "uint2", codes.group, tier)).all()


def test_bytes_per_weight() -> None:
    fmt = QuantFormat("q2_0", "gguf")
    codes = GGUF_CODES["Q2_0"](torch.from_numpy(random_blocks(32)))
    matrix = PackedMatrix.from_codes(cases.workspace_of("scalar"), codes)
    assert (fmt.along, fmt.file_bytes_per_weight) == (BLOCK, BYTES / BLOCK)
    assert matrix.packed_bytes == fmt.bytes_per_weight * 32 * DEPTH
    assert fmt.gpu_expert


def test_a_forks_blocks_of_128_weights_are_named(tmp_path: Path) -> None:
    """Such a tensor ends before its blocks of 64 would, or the next one begins before."""
    data, own = random_blocks(block=128), random_blocks()
    for i, matrices in enumerate(((own, data), (data, own))):
        with pytest.raises(CheckpointError, match="Q2_0 has blocks of 64 weights in llama.cpp, of 128 in a fork"):
            GGUFFile(written(tmp_path / f"{i}.gguf", *matrices))
