"""int8 activations where 256 k share a scale (K-quants, codebooks), against float64 of the rounded activations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernel_cases as cases
from tandem.bench import formats
from tandem.formats import reference
from tandem.formats.codes import WeightCodes
from tandem.kernels.cpu import PackedExperts, PackedMatrix
from tandem.kernels.int8_activations import SHARED_BLOCK, rounded_codes, rounded_to_int8, rounding_steps

TYPES = [
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s",
]  # fmt: skip
ONE, ROWS = 0x3C00, 40  # a half; of weights
each_type = pytest.mark.parametrize(("kind", "tier"), cases.pairwise(TYPES, cases.TIERS))
OPERATIONS = 5  # roundings of a block of 256 k: its two sums to float, their halves, the scale of x


def weights_of(kind: str, depth: int, half: int = formats.SMALL_HALF) -> WeightCodes:
    """Random blocks, in rows of their own ones of equal bytes: the least and the greatest codes and scales."""
    of = formats.GGUF[kind]
    random = torch.Generator().manual_seed(depth)
    blocks = torch.randint(0, 256, (ROWS, depth // of.weights, of.bytes), generator=random, dtype=torch.uint8)
    for row, byte in enumerate((0, 255, 128, 127, 15, 240)):
        blocks[row] = byte
    for offset in of.halves:
        blocks[..., offset], blocks[..., offset + 1] = half & 255, half >> 8
    return of.read(blocks.flatten(1))


@functools.cache
def case(kind: str, depth: int, half: int) -> tuple[WeightCodes, Tensor, Tensor]:
    """The weights, their numbers and their magnitudes in float64."""
    codes = weights_of(kind, depth, half)
    return codes, reference.decoded(codes).double(), reference.magnitudes(codes).double()


def integers(count: int, depth: int, most: int) -> Tensor:
    """Rows of integers below `most`, with a 127 in every block, so that scales are 1."""
    random = torch.Generator().manual_seed(count)
    x = torch.randint(-most, most + 1, (count, depth), generator=random).float()
    x[:, ::SHARED_BLOCK] = 127
    return x.bfloat16()


@each_type
def test_integers_are_exact(kind: str, tier: str) -> None:
    """With halves of 1 whatever is summed is an integer, or eighths of one, that float32 holds."""
    cases.require_tier(tier)
    codes, weight, size = case(kind, 512, ONE)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier), codes)
    unit = 1 / 8 if codes.fmt.startswith("iq") else 1
    for rows in (1, 2, 3, 4, 5, 11):
        x = integers(rows, 512, 4)
        expected = x.double() @ weight.T
        assert (x.double().abs() @ size.T).max() < unit * 2**24
        assert torch.equal(matrix.with_int8_activations(x, torch.float32).double(), expected), rows


def bound(x: Tensor, size: Tensor) -> Tensor:
    """Largest error of the float operations between integers: a block's, and the sums of blocks."""
    blocks = -(-x.shape[1] // SHARED_BLOCK)
    return (OPERATIONS + blocks) * cases.F32_UNIT * (x.abs() @ size.T)


@each_type
def test_nothing_overflows(kind: str, tier: str) -> None:
    """The largest activations of one sign, in turns of signs, and of the weights' own signs."""
    cases.require_tier(tier)
    codes, weight, size = case(kind, 512, formats.SMALL_HALF)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier), codes)
    signs = torch.where(weight[:6] < 0, -1.0, 1.0)
    turns = torch.ones(512) - 2 * (torch.arange(512) % 2)
    x = 127 * torch.cat((torch.ones(1, 512), -torch.ones(1, 512), turns[None], signs.float()))
    error = (matrix.with_int8_activations(x.bfloat16(), torch.float32).double() - x.double() @ weight.T).abs()
    assert (error <= bound(x.double(), size)).all()


@each_type
def test_rows_are_those_of_rounded_activations(kind: str, tier: str) -> None:
    cases.require_tier(tier)
    codes, weight, size = case(kind, 768, formats.SMALL_HALF)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier), codes)
    x = cases.activations(11, 768, "f32") * torch.logspace(-3, 3, 11)[:, None]
    steps = rounding_steps(x, SHARED_BLOCK).double()
    rounded = rounded_to_int8(x, SHARED_BLOCK).double()
    assert rounded_codes(x, SHARED_BLOCK)[0].abs().max() == 127
    # Where x / scale lies next to a half, another rounding of 1 / scale may choose the neighbour.
    near = (((x.double() / steps).abs() % 1 - 0.5).abs() < 1e-4) * steps
    error = (matrix.with_int8_activations(x).double() - rounded @ weight.T).abs()
    assert (error <= bound(rounded.abs() + near, size) + near @ weight.abs().T).all()


@each_type
def test_a_row_does_not_depend_on_its_neighbours(kind: str, tier: str) -> None:
    cases.require_tier(tier)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier), case(kind, 768, formats.SMALL_HALF)[0])
    many = 11 if tier.startswith("amx") else 70
    x = cases.activations(many, 768, "f32")
    alone = torch.cat([matrix.with_int8_activations(row[None]) for row in x])
    for rows in (2, 3, 7, many):
        assert torch.equal(matrix.with_int8_activations(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("tier", cases.TIERS)
def test_numbers_that_are_none_spoil_their_own_row(tier: str) -> None:
    cases.require_tier(tier)
    matrix = PackedMatrix.from_codes(cases.workspace_of(tier), case("q4_k", 512, formats.SMALL_HALF)[0])
    x = cases.activations(5, 512, "f32")
    x[1, 100], x[2, 300], x[3] = torch.inf, torch.nan, 0
    y = matrix.with_int8_activations(x)
    assert y[1].isnan().all() and y[2].isnan().all() and (y[3] == 0).all()
    assert torch.equal(y[0], matrix.with_int8_activations(x[:1])[0]) and y[4].isfinite().all()


@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize("kinds", [("q4_k", "q6_k"), ("iq2_xxs", "q2_k")])
def test_experts_of_such_types(kinds: tuple[str, str], tier: str) -> None:
    """Nearer to float64 with rounded activations than that is to unrounded ones: both products round, and no other."""
    cases.require_tier(tier)
    gate_up, down = (case(kind, 256, formats.SMALL_HALF) for kind in kinds)
    hidden = width = 256
    layer = PackedExperts(cases.workspace_of(tier), 1, hidden, width, int8_activations=True)
    wide = [_repeated(_rows(of[0], first, 32), 8) for of, first in ((gate_up, 8), (gate_up, 0), (down, 0))]
    layer.load(0, *wide)
    g, u, d = (reference.decoded(w).double() for w in wide)
    x = cases.activations(4, hidden, "bf16")
    y = layer.forward(
        x, torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1), torch.empty(4, hidden, dtype=torch.float32)
    ).double()

    def expected(round_it: bool) -> Tensor:
        rounded = rounded_to_int8(x.float(), SHARED_BLOCK).double() if round_it else x.double()
        inner = (torch.nn.functional.silu(rounded @ g.T) * (rounded @ u.T)).bfloat16().float()
        return (rounded_to_int8(inner, SHARED_BLOCK).double() if round_it else inner.double()) @ d.T

    cost = (expected(True) - expected(False)).norm()
    assert cost > 0 and (y - expected(True)).norm() < 0.3 * cost


def _mapped(codes: WeightCodes, change: Callable[[Tensor], Tensor]) -> WeightCodes:
    tensors = {f.name: value for f in dataclasses.fields(codes) if isinstance(value := getattr(codes, f.name), Tensor)}
    return dataclasses.replace(codes, **{name: change(tensor) for name, tensor in tensors.items()})


def _rows(codes: WeightCodes, first: int, count: int) -> WeightCodes:
    return _mapped(codes, lambda tensor: tensor[first : first + count].contiguous())


def _repeated(codes: WeightCodes, times: int) -> WeightCodes:
    return _mapped(codes, lambda tensor: tensor.repeat(times, 1))
