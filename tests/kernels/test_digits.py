"""Products of activations as digits (AMX's few rows): nothing is lost but what a float32 sum over groups rounds."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_cases as cases
from tandem.bench.formats import GGUF
from tandem.formats.codes import WeightCodes, join_nibbles
from tandem.formats.reference import magnitudes
from tandem.kernels.cpu import PackedExperts, PackedMatrix, Workspace
from tandem.kernels.fit import as_packed

# Portable code; AVX-512 VNNI where no AMX is (that tier's table lists digits for tests only); AMX.
TIERS = ["amx_standin", "avx512_bf16", "amx"]
FORMATS = [
    ("int8", 0),
    ("int8", 32),
    ("int8", 128),
    ("int8", 256),
    ("int4", 32),
    ("int4", 64),
    ("int4", 128),
    ("int4_zeros", 32),
    ("int4_zeros", 128),
    ("mxfp4", 32),
    ("nvfp4", 16),
    ("int6", 16),
    ("int3", 16),
    ("int2_zeros", 16),
]
ALWAYS, NEVER = 1 << 30, 0
SHAPES = [(1, 1), (33, 65), (75, 333), (40, 1100)]  # [N, K]: not multiples of panel, group or block
ROWS = [1, 2, 3, 5, 17]

each_tier = pytest.mark.parametrize("tier", TIERS)
each_format = pytest.mark.parametrize(("fmt", "group"), FORMATS)


@functools.cache
def workspace(tier: str, digits_below_rows: int) -> Workspace:
    cases.require_tier(tier)
    return Workspace(cases.pool_of(2), tier, cases.ALGORITHMS["dot_rows"], digits_below_rows)


def steps_of(x: Tensor, group: int) -> Tensor:
    """Of each activation, [T, K]: the unit of its group's digits."""
    group = group or 128
    largest = F.pad(x.double().abs(), (0, -x.shape[1] % group)).view(len(x), -1, group).amax(-1)
    exponent = torch.where(largest > 0, largest, 1.0).log2().floor().clamp(min=-105)
    return (exponent - 21).exp2().repeat_interleave(group, 1)[:, : x.shape[1]]


def digits_bound(x: Tensor, size: Tensor, group: int) -> Tensor:
    """Half a unit of each activation that is not a multiple of its unit; of a group's sum, what 256 * d1 + d0 (below
    2^15 units) loses as float; and the roundings of some operations per group, two each without FMA."""
    steps = steps_of(x, group)
    inexact = 0.5 * steps * (x.double().remainder(steps) != 0) + 2.0**-9 * steps
    groups = -(-x.shape[1] // (group or 128))
    return inexact @ size.T + (6 * groups + 12) * cases.F32_UNIT * (x.double().abs() + steps) @ size.T


def check(matrix: PackedMatrix, x: Tensor, size: Tensor, group: int) -> None:
    expected = x.double() @ matrix.dequantised().double().T
    error = (matrix(x, torch.float32).double() - expected).abs()
    assert (error <= digits_bound(x, size, group)).all()


@each_format
@each_tier
def test_product_matches_float64(fmt: str, group: int, tier: str) -> None:
    for n, k in SHAPES:
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 4099 + k))
        matrix = cases.packed_matrix(workspace(tier, ALWAYS), weight, None, fmt, group)
        assert matrix.tier == tier
        assert torch.equal(matrix.dequantised(), as_packed(weight, fmt, group))
        size = cases.magnitude_of(weight, fmt, group).double()
        for rows in ROWS:
            check(matrix, cases.activations(rows, k, fmt), size, group)


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_1", "q4_k", "q6_k", "iq4_xs"])
@each_tier
def test_offsets_and_scales_of_gguf(name: str, tier: str) -> None:
    codes = GGUF[name].random(name, 40, 768)
    matrix = PackedMatrix.from_codes(workspace(tier, ALWAYS), codes)
    size, group = magnitudes(codes).double(), codes.group
    for rows in ROWS:
        check(matrix, cases.activations(rows, 768, name), size, group)


def extreme_rows(k: int) -> Tensor:
    """Numbers over many powers of two, zeros, subnormals, one huge among small ones, all large, all small."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(8, k, generator=random)
    x[0] *= torch.randint(-40, 41, (k,), generator=random).float().exp2()
    x[1] = 0
    x[2] *= 2.0**-130
    x[3, k // 2] = 1e30
    x[4] *= 2.0**60
    x[5] *= 2.0**-110
    x[6] *= torch.randint(-14, 1, (k,), generator=random).float().exp2()
    x[7, ::2] = 0
    return x.bfloat16()


@each_format
@each_tier
def test_wide_ranges_in_one_group(fmt: str, group: int, tier: str) -> None:
    weight = torch.randn(40, 260, generator=torch.Generator().manual_seed(3))
    matrix = cases.packed_matrix(workspace(tier, ALWAYS), weight, None, fmt, group)
    x = extreme_rows(260)
    y = matrix(x, torch.float32)
    expected = x.double() @ matrix.dequantised().double().T
    bound = digits_bound(x, cases.magnitude_of(weight, fmt, group).double(), group)
    assert ((y.double() - expected).abs() <= bound + 2.0**-120).all()  # results below float's range, too
    assert (y[1] == 0).all()


@each_tier
def test_sums_are_exact_where_floats_are_not(tier: str) -> None:
    """15 products of 2^24 and their negatives around one of 7: only integers find it."""
    code = torch.full((32, 64), 7, dtype=torch.uint8)
    scales = torch.ones(32, 2, dtype=torch.bfloat16)
    codes = WeightCodes(join_nibbles(code), scales, "int4", 32, 64)
    x = torch.zeros(3, 64)
    x[:, 1:16], x[:, 16], x[:, 17:32] = 255 * 2.0**14, 1, -255 * 2.0**14
    digits, floats = (PackedMatrix.from_codes(workspace(tier, rows), codes) for rows in (ALWAYS, NEVER))
    assert (digits(x.bfloat16(), torch.float32) == 7).all()
    assert (floats(x.bfloat16(), torch.float32) != 7).all()


@pytest.mark.parametrize("value", [1.0, 1 + 2.0**-6, 1 + 2.0**-7, 2 - 2.0**-7])
@pytest.mark.parametrize("code", [-128, 127])
@each_tier
def test_integer_sums_of_the_longest_groups_fit(code: int, value: float, tier: str) -> None:
    """512 products of one sign, of the largest codes, with digits of -128 to 127; float32 holds the results."""
    codes = WeightCodes(torch.full((32, 512), code, dtype=torch.int8), torch.ones(32, 2), "int8", 256, 512)
    x = torch.tensor([[value], [-value]]).expand(2, 512).bfloat16()
    y = PackedMatrix.from_codes(workspace(tier, ALWAYS), codes)(x.contiguous(), torch.float32)
    assert (y == x[:, :1].float() * code * 512).all()


@each_tier
def test_rows_are_independent_and_of_bfloat16(tier: str) -> None:
    weight = torch.randn(75, 333, generator=torch.Generator().manual_seed(3))
    matrix = cases.packed_matrix(workspace(tier, ALWAYS), weight, None, "int4", 32)
    x = torch.randn(9, 333, generator=torch.Generator().manual_seed(4))
    y = matrix(x.bfloat16(), torch.float32)
    assert torch.equal(y, torch.cat([matrix(row[None].bfloat16(), torch.float32) for row in x]))
    assert torch.equal(y, matrix(x, torch.float32))


@each_tier
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("fmt", "group"), [("int8", 0), ("int4", 32), ("int4_zeros", 32)])
def test_what_is_no_number_spoils_its_row_only(fmt: str, group: int, value: float, tier: str) -> None:
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    matrix = cases.packed_matrix(workspace(tier, ALWAYS), weight, None, fmt, group)
    x = cases.activations(3, 256, fmt)
    y = matrix(x, torch.float32)
    x[1, 100] = value
    spoilt = matrix(x, torch.float32)
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[::2], y[::2])


# -- experts

EXPERTS, HIDDEN, WIDTH, TOP_K = 6, 150, 72, 2


def layer_of(tier: str, digits_below_rows: int) -> PackedExperts:
    """All of one tier; digits for experts with few rows."""
    cases.require_tier(tier)
    random = torch.Generator().manual_seed(2)
    shared = Workspace(cases.pool_of(2), tier, -1, digits_below_rows)
    layer = PackedExperts(shared, EXPERTS, HIDDEN, WIDTH, "int4", group=32)
    for expert in range(EXPERTS):
        gate, up = torch.randn(2, WIDTH, HIDDEN, generator=random) / HIDDEN**0.5
        down = torch.randn(HIDDEN, WIDTH, generator=random) / WIDTH**0.5
        layer.load(expert, gate, up, down)
    return layer


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Experts 0 and 1 have many rows; 2, 3 and 4 few, of tokens that others share; 5 has none."""
    ids = torch.tensor([[0, 1]] * 24, dtype=torch.int32)
    ids[3], ids[7], ids[8], ids[20] = (torch.tensor(pair) for pair in ([0, 2], [3, 2], [2, 4], [-1, 4]))
    random = torch.Generator().manual_seed(3)
    x = torch.randn(24, HIDDEN, generator=random).bfloat16()
    return x, ids, torch.rand(24, TOP_K, generator=random)


@each_tier
def test_experts_with_few_rows_take_digits(tier: str) -> None:
    """In one batch with others, which give the bits that they give without them."""
    x, ids, weights = routed()
    digits, usual = layer_of(tier, 6), layer_of(tier, NEVER)
    few, many = (torch.where(chosen, weights, 0.0) for chosen in (ids >= 2, (ids == 0) | (ids == 1)))
    assert torch.equal(digits.forward(x, ids, many), usual.forward(x, ids, many))
    out = [torch.empty(x.shape, dtype=torch.float32) for _ in range(2)]
    y, plain = (layer.forward(x, ids, few, to) for layer, to in zip((digits, usual), out, strict=True))
    assert not torch.equal(y, plain)
    # Intermediate activations are rounded to bfloat16: a last bit of a sum may decide one of them.
    assert (y - plain).norm() <= cases.BF16_UNIT * plain.norm()
    assert torch.equal(digits.forward(x.float(), ids, weights).bfloat16(), digits.forward(x, ids, weights))


@each_tier
def test_few_tokens_of_experts(tier: str) -> None:
    """Every token alone gives the bits that it gives in a batch of few rows."""
    x, _, weights = routed()
    random = torch.Generator().manual_seed(5)
    ids = torch.rand(4, EXPERTS, generator=random).topk(TOP_K).indices.int()
    layer, x, weights = layer_of(tier, 6), x[:4].contiguous(), weights[:4].contiguous()
    alone = [layer.forward(x[t, None], ids[t, None], weights[t, None]) for t in range(4)]
    assert torch.equal(layer.forward(x, ids, weights), torch.cat(alone))
