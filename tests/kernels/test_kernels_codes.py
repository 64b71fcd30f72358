"""Codes as checkpoints store them: every code decodes exactly on every tier, nothing is rounded on the way in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import kernel_cases as cases
from tandem.errors import KernelError
from tandem.formats import codes as stored_codes
from tandem.formats import gguf_blocks
from tandem.formats.codes import WeightCodes
from tandem.formats.cut import columns_of, rows_of, stacked
from tandem.formats.reference import decoded, magnitudes, stored
from tandem.kernels.cpu import PackedExperts, PackedMatrix
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps, round_to_format

FP8 = torch.float8_e4m3fn
ROOT = Path(__file__).parents[2]
each_way = pytest.mark.parametrize(
    ("tier", "algorithm"), [(tier, algorithm) for tier in cases.TIERS for algorithm in cases.ALGORITHMS]
)


LEVELS = {"fp8": 256, "int8": 256, "int6": 64, "int3": 8, "uint2": 4}  # of codes that have a byte each


def all_codes(fmt: str, group: int, scale: float = 1.0) -> WeightCodes:
    """Every code (but NaN) in 17 rows, each shifted by one, with one scale for all."""
    count = LEVELS.get(fmt, 16)
    codes = (torch.arange(256)[None] + torch.arange(17)[:, None]) % count
    if fmt == "fp8":
        codes[codes % 128 == 127] = 0
    codes = codes.to(torch.uint8)
    scales = torch.full((17, 256 // group if group else 1), scale)
    joined = codes if fmt in LEVELS else stored_codes.join_nibbles(codes)
    zeros = (
        5 * torch.ones(scales.shape, dtype=torch.int8) if fmt in ("uint4", "uint2") and group == 64 else None
    )
    return WeightCodes(joined, scales, fmt, group, 256, zeros=zeros)


# AMX multiplies scales in as halves if products are normal ones: 2^-9 is, 1 is not, 2^-22 is not for fp8 alone, and
# 2^-31 for none.
SCALES = [1.0, 2.0**-9, -(2.0**-22), 2.0**-31]
CODES = [
    ("fp8", 0), ("fp8", 32), ("fp8", 128), ("fp4", 16), ("fp4", 32), ("int8", 0), ("int8", 16), ("int8", 32),
    ("int8", 128), ("int6", 16), ("int6", 128), ("int4", 32), ("int4", 128), ("uint4", 32), ("uint4", 64),
    ("int3", 16), ("int3", 64), ("uint2", 16), ("uint2", 64), ("nl4", 16), ("nl4", 128),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fmt", "group", "scale", "tier", "algorithm"),
    cases.pairwise(CODES, SCALES, cases.TIERS, cases.ALGORITHMS),
)
def test_every_code_is_exact(fmt: str, group: int, scale: float, tier: str, algorithm: str) -> None:
    """Rows of the identity pick single weights, subnormals included, out of the packed matrix: all at once, as many as
    tiles take at once, and few."""
    cases.require_tier(tier)
    codes = all_codes(fmt, group, scale)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), codes)
    assert matrix.tier == tier
    for rows in (256, 32, 5):
        y = torch.cat([matrix(x) for x in torch.eye(256).split(rows)])
        assert torch.equal(y.T, decoded(codes)), rows
    assert torch.equal(matrix.dequantised(), decoded(codes))


@each_way
@pytest.mark.parametrize("group", [0, 128])
def test_fp8_nan_makes_its_row_nan(group: int, tier: str, algorithm: str) -> None:
    cases.require_tier(tier)
    codes = all_codes("fp8", group)
    codes.codes[3, 200] = 0x7F
    codes.codes[16, 0] = 0xFF
    y = PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), codes)(torch.ones(2, 256))
    expected = torch.zeros(17, dtype=torch.bool)
    expected[[3, 16]] = True
    assert torch.equal(y.isnan().any(0), expected)
    assert torch.equal(y.isnan().all(0), expected)


def test_the_core_decodes_as_torch_does() -> None:
    """e4m3 against torch's own conversion, all 254 numbers."""
    codes = torch.tensor([c for c in range(256) if c % 128 != 127], dtype=torch.uint8)[None]
    one = stored_codes.fp8_channels(codes.view(FP8), torch.ones(()))
    matrix = PackedMatrix.from_codes(cases.workspace_of("scalar"), one)
    assert torch.equal(matrix.dequantised(), codes.view(FP8).float())


@each_way
def test_e8m0_scales_are_exact(tier: str, algorithm: str) -> None:
    """All 255 powers of two, and NaN for 255, applied to a code that is 1 in row and group. AMX's tiles take subnormal
    weights, here 2^-127, for zero (Intel SDM, TDPBF16PS)."""
    cases.require_tier(tier)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = stored_codes.mxfp4(torch.full((256, 16), 0x22, dtype=torch.uint8), scales)
    assert codes.scales.element_size() == 1
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), codes)
    exact = 2.0 ** (torch.arange(255).double() - 127)
    multiplied = exact.clone()
    multiplied[0] *= (tier, algorithm) != ("amx", "tile_mm")
    first = torch.eye(32)[:2]
    many = torch.cat((first, torch.zeros(15, 32)))
    for got, expected in (
        (matrix(first)[1], multiplied),
        (matrix(many)[1], multiplied),
        (matrix.dequantised()[:, 1], exact),
    ):
        assert torch.equal(got[:255].double(), expected)
        assert got[255].isnan()


@each_way
def test_e8m0_scales_times_every_code_are_exact(tier: str, algorithm: str) -> None:
    cases.require_tier(tier)
    scales = torch.arange(8, 250, dtype=torch.uint8)[:, None].repeat(1, 2)
    nibbles = stored_codes.join_nibbles(torch.arange(64, dtype=torch.uint8).expand(len(scales), 64) % 16)
    codes = stored_codes.mxfp4(nibbles, scales)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), codes)
    for rows in (1, 5, 20, 64):
        y = torch.cat([matrix(x) for x in torch.eye(64).split(rows)]).T
        assert torch.equal(y, decoded(codes)), rows


@each_way
def test_e4m3_scales_are_exact(tier: str, algorithm: str) -> None:
    """All 254 numbers times every code times the matrix's factor; a NaN makes its row NaN. Alone, and beside a group of
    another scale that may be 0."""
    cases.require_tier(tier)
    ones = torch.arange(256, dtype=torch.uint8)[:, None]
    scales = torch.cat((ones, ones.roll(1, 0), ones), 1).view(FP8)
    nibbles = stored_codes.join_nibbles(torch.arange(48, dtype=torch.uint8).expand(256, 48) % 16)
    codes = stored_codes.nvfp4(nibbles, scales, 0.375)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), codes)
    expected = decoded(codes)
    is_nan = expected.isnan().any(1)
    assert is_nan.sum() == 4
    got = [torch.cat([matrix(x) for x in torch.eye(48).split(rows)]).T for rows in (1, 5, 20, 48)]
    for y in (matrix.dequantised(), *got):
        assert torch.equal(y[~is_nan], expected[~is_nan])
        assert y[is_nan].isnan().all()


def test_mxfp4_takes_the_blocks_of_gpt_oss() -> None:
    codes = torch.randint(0, 256, (5, 64), dtype=torch.uint8)
    scales = torch.randint(110, 130, (5, 4), dtype=torch.uint8)
    flat, blocks = stored_codes.mxfp4(codes, scales), stored_codes.mxfp4(codes.view(5, 4, 16), scales)
    assert torch.equal(decoded(flat), decoded(blocks))
    assert torch.equal(
        decoded(flat)[0, :2],
        torch.stack([_e2m1(codes[0, 0] & 15), _e2m1(codes[0, 0] >> 4)]) * _power(scales[0, 0]),
    )


def _e2m1(code: Tensor) -> Tensor:
    """From the definition: sign, 2 bits of exponent with bias 1, 1 bit of mantissa."""
    exponent, half, sign = int(code) >> 1 & 3, int(code) & 1, -1 if int(code) & 8 else 1
    return torch.tensor(sign * (2.0 ** (exponent - 1) * (1 + half / 2) if exponent else half / 2))


def _power(code: Tensor) -> float:
    return 2.0 ** (int(code) - 127)


# Where the halves of a block lie, of each type that the `gguf` package reads.
GGUF_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
    "NVFP4": (), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ2_0": (64,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ1_M": (),
}  # fmt: skip


# Weights of up to some hundreds, of a model's size, and too small for AMX's halves.
@pytest.mark.parametrize(
    ("name", "tier", "size"), cases.pairwise(GGUF_HALVES, cases.TIERS, [1.0, 2.0**-13, 2.0**-20])
)
def test_gguf_weights_equal_ggufs_own_reading(name: str, tier: str, size: float) -> None:
    """Random bytes, with sane halves, some of them 0: every layout of scales and codes, every code."""
    cases.require_tier(tier)
    kind, random = gguf.GGMLQuantizationType[name], np.random.default_rng(1)
    weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (33, 768 // weights, block_bytes), dtype=np.uint8)
    for at in GGUF_HALVES[name]:
        half = (size * random.uniform(-1, 1, (*blocks.shape[:2], 1))).astype(np.float16)
        half[::7, 0] = 0
        blocks[..., at : at + 2] = half.view(np.uint8)
    if name == "MXFP4":  # a block's scale is one exponent: of 2^-20 to 2^3 times `size`
        blocks[..., 0] = random.integers(107, 131, blocks.shape[:2]) + int(np.log2(size))
    if name == "NVFP4":  # scales have no sign: writers leave bit 7 alone
        blocks[..., :4] &= 127
    if name == "IQ1_M":  # a quarter of the half ends each of the last four words
        half = np.abs(size * random.uniform(0.1, 1, blocks.shape[:2])).astype(np.float16).view(np.uint16)
        for i in range(4):
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | (half >> 4 * i & 15) << 4
    data = blocks.reshape(33, -1)
    codes = gguf_blocks.GGUF_CODES[name](torch.from_numpy(data))
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    assert torch.equal(decoded(codes), expected)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier), codes)
    assert torch.equal(matrix.dequantised(), expected)
    for rows in (3, 20, 40):
        x = cases.activations(rows, 768, "uint4")
        magnitude = x.double().abs() @ magnitudes(codes).double().T
        error = (matrix(x, torch.float32).double() - x.double() @ expected.double().T).abs()
        assert (error <= cases.product_bound(magnitude, 768, "uint4", codes.group, tier)).all()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q5_1", "IQ4_XS", "IQ2_S", "IQ3_XXS", "IQ1_M"])
def test_cutting_and_stacking_keep_the_weights(name: str) -> None:
    """Experts and fused matrices are rows, columns and stacks of what the file holds."""
    weights, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    data = torch.randint(0, 120, (40, 1024 // weights * block_bytes), dtype=torch.uint8)
    whole = gguf_blocks.GGUF_CODES[name](data)
    parts = [rows_of(whole, slice(0, 16)), rows_of(whole, slice(16, 40))]
    again = stacked(parts)
    assert again is not None
    for codes, same in ((again, whole), (columns_of(whole, slice(256, 768)), decoded(whole)[:, 256:768])):
        matrix = PackedMatrix.from_codes(cases.workspace_of("scalar"), codes)  # type: ignore[arg-type]
        exact = same if isinstance(same, Tensor) else decoded(same)
        assert torch.equal(matrix.dequantised(), exact)
    odd = columns_of(whole, slice(256, 256 + weights // 2))
    assert torch.equal(odd, decoded(whole)[:, 256 : 256 + weights // 2])  # type: ignore[arg-type]


def test_zero_points() -> None:
    """weight = (code - zero) * scale, exactly, for all zeros (GPTQ has 16 too) and halves as scales."""
    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(17, 1)
    scales, zeros = torch.rand(17, 16).half(), torch.arange(17)[:, None].repeat(1, 16)
    packed = stored_codes.int4_zeros(codes, scales, zeros, 32)
    assert packed.scales.element_size() + packed.zeros.element_size() == 3  # type: ignore[union-attr]
    matrix = PackedMatrix.from_codes(cases.workspace_of("scalar"), packed)
    single = stored_codes.split_nibbles(codes, 512).float() - torch.arange(17)[:, None]
    assert torch.equal(matrix.dequantised(), single * scales.float().repeat_interleave(32, 1))


@each_way
def test_zero_points_of_bytes(tier: str, algorithm: str) -> None:
    """int8 codes whose zero is anywhere: exact where products are."""
    cases.require_tier(tier)
    codes, zeros = (
        torch.arange(256, dtype=torch.uint8).repeat(40, 1),
        torch.arange(-128, 128)[None].repeat(40, 1),
    )
    halves = torch.full((40, 8), 2.0**-9, dtype=torch.float16)
    packed = WeightCodes(codes, halves, "int8", 32, 256, zeros=zeros[:, ::32].to(torch.int8).contiguous())
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), packed)
    exact = (codes.view(torch.int8).float() - zeros[:, ::32].repeat_interleave(32, 1)) * 2.0**-9
    assert torch.equal(matrix.dequantised(), exact)
    assert torch.equal(matrix(torch.eye(256)).T, exact)


@each_way
def test_down_may_have_another_format(tier: str, algorithm: str) -> None:
    """As llama.cpp mixes them: gate and up in 4 bits with offsets, down in 8 bits with smaller groups; and numbers."""
    cases.require_tier(tier)
    gate, up = stored(torch.randn(96, 256), "int4_zeros", 32), stored(torch.randn(96, 256), "int4_zeros", 32)
    coded = stored(torch.randn(256, 96), "nvfp4")
    for fmt, down in (("bf16", coded), ("f32", torch.randn(256, 96)), ("int4", torch.randn(256, 96))):
        mixed = PackedExperts(cases.workspace_of(tier, algorithm), 2, 256, 96, fmt)
        mixed.load(1, gate, up, down)
        ids, weights = torch.tensor([[1]] * 20, dtype=torch.int32), torch.ones(20, 1)
        x = cases.activations(20, 256, "bf16")
        y = mixed.forward(x, ids, weights, out=torch.empty(20, 256))
        hidden = torch.nn.functional.silu(x.float() @ decoded(gate).T) * (x.float() @ decoded(up).T)
        exact = down if fmt == "f32" else round_to_format(down, fmt).float()
        rounding = 3 * cases.BF16_UNIT * hidden.abs().amax(1, keepdim=True) * exact.abs().sum(1)
        assert ((y - hidden @ exact.T).abs() <= rounding).all(), fmt


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "int4_zeros"])
def test_both_ops_take_codes(fmt: str) -> None:
    codes, x = (
        stored(torch.randn(64, 128), fmt, 32 if fmt == "int4_zeros" else 128),
        torch.randn(3, 128).bfloat16(),
    )
    cpu = CpuOps(cases.pool_of(1), "scalar")
    expected = TorchOps().linear(codes)(x, torch.float32)
    assert torch.allclose(cpu.linear(codes)(x, torch.float32), expected, rtol=1e-5, atol=1e-4)
    layers = [ops.experts(1, 128, 64) for ops in (cpu, TorchOps())]
    down = stored(torch.randn(128, 64), "mxfp8")
    for layer in layers:
        layer.load(0, codes, codes, down)
    ids, weights = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    mine, theirs = (layer.forward(x, ids, weights, out=torch.empty(3, 128)) for layer in layers)
    # TorchOps rounds gate, up and their product to bfloat16, CpuOps the product.
    assert (mine - theirs).norm() <= 4 * cases.BF16_UNIT * theirs.norm()


def test_fp8_blocks_that_do_not_fill_the_matrix() -> None:
    weight, scale = torch.randn(200, 300).to(FP8), torch.rand(2, 3)
    matrix = PackedMatrix.from_codes(cases.workspace_of("scalar"), stored_codes.fp8_blocks(weight, scale))
    spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(matrix.dequantised(), weight.float() * spread)


def refusals() -> dict[str, tuple[object, str]]:
    workspace = cases.workspace_of("scalar")
    fp8, fp4 = stored(torch.ones(40, 100), "fp8"), stored(torch.ones(40, 100), "mxfp4")
    down = stored(torch.ones(100, 40), "fp8")
    layer = PackedExperts(workspace, 4, 100, 40, "int8")
    layer.load(0, fp8, fp8, down)
    numbers = torch.ones(40, 100), torch.ones(40, 100), torch.ones(100, 40)

    def changed(**fields: object) -> object:
        values = {name: getattr(fp8, name) for name in fp8.__slots__} | fields
        return lambda: PackedMatrix.from_codes(workspace, WeightCodes(**values))

    return {
        "scales": (changed(scales=torch.ones(2, 1)), r"scales has shape \[2, 1\]; expected \[1, 1\]"),
        "int32": (changed(scales=torch.ones(1, 1).int()), "scales cannot be torch.int32"),
        "codes": (changed(codes=torch.ones(40, 100)), "codes is float32; expected int8 or uint8"),
        "depth": (changed(depth=99), "codes has shape"),
        "block rows": (changed(block_rows=0), "block_rows is 0"),
        "group": (changed(group=48), "group size 48 is not supported for fp8"),
        "fp4 rows": (changed(fmt="fp4", group=0), "fp4 needs a group"),
        "e4m3 by row": (
            changed(
                fmt="int8", group=0, block_rows=1, scales=torch.ones(40, 1).to(FP8), factors=torch.ones(40)
            ),
            "e4m3 scales are those of groups",
        ),
        "offsets' shape": (changed(offsets=torch.ones(1)), "offsets has shape"),
        "offsets' type": (
            changed(offsets=torch.ones(1, 1).bfloat16()),
            "offsets is bfloat16; expected float32",
        ),
        "offsets of rows": (
            changed(group=0, scales=torch.ones(40, 1), block_rows=1, offsets=torch.ones(40, 1)),
            "fp8 with offsets needs a group",
        ),
        "fp8 and halves": (
            changed(scales=torch.ones(1, 1).half()),
            "fp8 needs float32, bfloat16 or e8m0 scales",
        ),
        "shared halves": (
            changed(fmt="int8", group=16, scales=torch.ones(1, 7).char(), halves=torch.ones(1, 2).half()),
            "scales' halves has shape",
        ),
        "groups of 64 with shared halves": (
            changed(fmt="int8", group=64, scales=torch.ones(1, 2).char(), halves=torch.ones(1, 1).half()),
            "scales of groups of 16, not 64",
        ),
        "no codes": (changed(fmt="bf16", group=0, scales=torch.ones(1, 1)), "bf16 weights have no codes"),
        "numbers": (
            lambda: PackedMatrix(workspace, torch.ones(4, 32), None, "fp8", 32),
            "from codes and scales",
        ),
        "experts from numbers": (
            lambda: PackedExperts(workspace, 4, 100, 40, "fp8", group=128).load(0, *numbers),
            "from codes and scales",
        ),
        "numbers among codes": (
            lambda: layer.load(1, *numbers),
            "expert 1: gate is int8 in groups of 32 with bf16 scales.*holds fp8 in groups of 128",
        ),
        "up's format": (
            lambda: layer.load(0, fp8, fp4, down),
            "expert 0: gate is fp8 .*, up is fp4 in groups of 32",
        ),
        "expert shape": (lambda: layer.load(0, fp8, fp8, fp8), "down codes has shape"),
        "tensor among codes": (lambda: layer.load(0, fp8, fp8, numbers[2]), "down is int8"),
        "gguf": (lambda: gguf_blocks.gguf_q8_0(torch.zeros(4, 35, dtype=torch.uint8)), "GGUF rows must be"),
    }


@pytest.mark.parametrize("name", refusals())
def test_bad_codes_are_refused(name: str) -> None:
    call, message = refusals()[name]
    with pytest.raises(KernelError, match=message):
        call()  # type: ignore[operator]


def test_grids_are_those_of_gguf() -> None:
    """All entries: random blocks meet few of IQ1's."""
    written = subprocess.run([sys.executable, ROOT / "scripts/grid_codes.py"], capture_output=True, text=True)
    assert written.stdout == (ROOT / "csrc/format/grid_codes.h").read_text(), written.stderr
