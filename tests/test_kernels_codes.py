"""Codes as checkpoints store them: every code decodes exactly on every tier, nothing is rounded on the way in."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import kernel_cases as cases
from tandem.errors import KernelError
from tandem.formats import codes as stored_codes
from tandem.formats.codes import WeightCodes
from tandem.formats.reference import decoded, stored
from tandem.kernels.cpu import PackedExperts, PackedMatrix

FP8 = torch.float8_e4m3fn
each_way = pytest.mark.parametrize(
    ("tier", "algorithm"), [(tier, algorithm) for tier in cases.TIERS for algorithm in cases.ALGORITHMS]
)


def all_codes(fmt: str, group: int) -> WeightCodes:
    """Every code (but NaN) in 17 rows, each shifted by one, with scales 1."""
    count = 256 if fmt in ("fp8", "int8") else 16
    codes = (torch.arange(256)[None] + torch.arange(17)[:, None]) % count
    if fmt == "fp8":
        codes[codes % 128 == 127] = 0
    codes = codes.to(torch.uint8)
    scales = torch.ones(17, 256 // group if group else 1)
    joined = codes if count == 256 else stored_codes.join_nibbles(codes)
    return WeightCodes(joined, scales, fmt, group, 256)


@each_way
@pytest.mark.parametrize(
    ("fmt", "group"), [("fp8", 0), ("fp8", 128), ("fp4", 16), ("fp4", 32), ("int8", 16), ("int4", 32)]
)
def test_every_code_is_exact(fmt: str, group: int, tier: str, algorithm: str) -> None:
    """Rows of the identity pick single weights, subnormals included, out of the packed matrix."""
    cases.require_tier(tier)
    codes = all_codes(fmt, group)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), codes)
    assert matrix.tier == tier
    assert torch.equal(matrix(torch.eye(256)).T, decoded(codes))
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


def test_e8m0_scales_are_exact() -> None:
    """All 255 powers of two, NaN for 255, in the bfloat16 that they are stored as."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    got = stored_codes.mxfp4(torch.zeros(256, 16, dtype=torch.uint8), scales).scales
    assert got.dtype is torch.bfloat16
    assert torch.equal(got[:255, 0].double(), 2.0 ** (torch.arange(255).double() - 127))
    assert got[255].isnan()
    assert torch.equal(got[:255], scales.view(torch.float8_e8m0fnu)[:255].to(torch.bfloat16))


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


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (gguf.GGMLQuantizationType.Q8_0, stored_codes.gguf_q8_0),
        (gguf.GGMLQuantizationType.Q4_0, stored_codes.gguf_q4_0),
    ],
)
@pytest.mark.parametrize("tier", cases.TIERS)
def test_gguf_weights_equal_ggufs_own_reading(
    kind: gguf.GGMLQuantizationType, read: Callable[[Tensor], WeightCodes], tier: str
) -> None:
    cases.require_tier(tier)
    weight = np.random.default_rng(0).standard_normal((33, 320)).astype(np.float32)
    data = gguf.quantize(weight, kind)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier), read(torch.from_numpy(data)))
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    assert torch.equal(matrix.dequantised(), expected)
    x = cases.activations(9, 320, "int8")
    magnitude = x.double().abs() @ expected.double().abs().T
    error = (matrix(x, torch.float32).double() - x.double() @ expected.double().T).abs()
    assert (error <= cases.product_bound(magnitude, 320, "int8", 32, tier)).all()


def test_fp8_blocks_that_do_not_fill_the_matrix() -> None:
    weight, scale = torch.randn(200, 300).to(FP8), torch.rand(2, 3)
    matrix = PackedMatrix.from_codes(cases.workspace_of("scalar"), stored_codes.fp8_blocks(weight, scale))
    spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(matrix.dequantised(), weight.float() * spread)


def refusals() -> dict[str, tuple[object, str]]:
    workspace = cases.workspace_of("scalar")
    fp8, fp4 = stored(torch.ones(40, 100), "fp8"), stored(torch.ones(40, 100), "mxfp4")
    layer = PackedExperts(workspace, 4, 100, 40, "fp8", group=128)  # bfloat16 scales
    down = stored(torch.ones(100, 40), "fp8")

    def changed(**fields: object) -> object:
        values = {name: getattr(fp8, name) for name in fp8.__slots__} | fields
        return lambda: PackedMatrix.from_codes(workspace, WeightCodes(**values))

    return {
        "scales": (changed(scales=torch.ones(2, 1)), r"scales has shape \[2, 1\]; expected \[1, 1\]"),
        "float16": (changed(scales=torch.ones(1, 1).half()), "scales: element type"),
        "codes": (changed(codes=torch.ones(40, 100)), "codes is float32; expected int8 or uint8"),
        "depth": (changed(depth=99), "codes has shape"),
        "block rows": (changed(block_rows=0), "block_rows is 0"),
        "group": (changed(group=48), "group size 48 is not supported for fp8"),
        "fp4 rows": (changed(fmt="fp4", group=0), "fp4 needs a group"),
        "no codes": (changed(fmt="bf16", group=0, scales=torch.ones(1, 1)), "bf16 weights have no codes"),
        "numbers": (
            lambda: PackedMatrix(workspace, torch.ones(4, 32), None, "fp8", 32),
            "from codes and scales",
        ),
        "experts from numbers": (
            lambda: layer.load(0, torch.ones(40, 100), torch.ones(40, 100), torch.ones(100, 40)),
            "from codes and scales",
        ),
        "scale type": (lambda: layer.load_codes(0, fp8, fp8, down), "scales are not of the type .* bfloat16"),
        "other format": (lambda: layer.load_codes(0, fp8, fp4, down), "up is fp4 in groups of 32"),
        "expert shape": (lambda: layer.load_codes(0, fp8, fp8, fp8), "down has shape"),
        "scale dtype": (
            lambda: PackedExperts(workspace, 4, 100, 40, scale_dtype=torch.float16),
            "scales cannot be torch.float16",
        ),
        "gguf": (lambda: stored_codes.gguf_q8_0(torch.zeros(4, 35, dtype=torch.uint8)), "GGUF rows must be"),
    }


@pytest.mark.parametrize("name", refusals())
def test_bad_codes_are_refused(name: str) -> None:
    call, message = refusals()[name]
    with pytest.raises(KernelError, match=message):
        call()  # type: ignore[operator]
