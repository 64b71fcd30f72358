"""Hyper-connections on the C++ core: against float64, row by row the same bits, in every tier."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem import _core
from tandem.errors import KernelError
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.streams.cpu import PIECE
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperStreams, HyperWeights

SHAPES = [(4, 512, 20), (4, 72, 20), (3, 1000, 5), (2, 16, 1)]  # streams, channels, iterations
F32_ULP, BF16_ULP = 2.0**-23, 2.0**-8


@pytest.fixture(scope="module", params=_core.supported_tiers())
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(_core.WorkerPool([-1, -1]), request.param)


def weights_of(ops: CpuOps | TorchOps, shape: Hyper, hidden: int, double: bool = False) -> HyperWeights:
    torch.manual_seed(1)
    columns = -(-shape.weights // 16) * 16
    matrix = torch.randn(columns, shape.streams * hidden) * (shape.streams * hidden) ** -0.5
    scale, base = torch.rand(columns) + 0.5, torch.randn(columns)
    if double:
        return HyperWeights(lambda x: x.double() @ matrix.double().T, scale.double(), base.double())
    return HyperWeights(ops.linear(matrix, fmt="f32"), scale, base)


def in_double(shape: Hyper, weights: HyperWeights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the block takes, the streams after it, and what follows the last block, as the formulas say."""
    n, x, y = shape.streams, x.double(), y.double()
    flat = x.flatten(1)
    made = weights.project(flat) * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + shape.norm_eps)
    made = made * weights.scale + weights.base
    taken = torch.einsum("tn,tnh->th", made[:, :n].sigmoid() + shape.eps, x)
    mixing = made[:, 2 * n : (2 + n) * n].unflatten(1, (n, n)).softmax(-1) + shape.eps
    mixing = mixing / (mixing.sum(-2, keepdim=True) + shape.eps)
    for _ in range(shape.iterations - 1):
        mixing = mixing / (mixing.sum(-1, keepdim=True) + shape.eps)
        mixing = mixing / (mixing.sum(-2, keepdim=True) + shape.eps)
    shared = 2 * made[:, n : 2 * n].sigmoid()[:, :, None] * y[:, None]
    return taken, shared + torch.einsum("tjk,tjh->tkh", mixing, x), taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("streams", "hidden", "iterations"), SHAPES)
def test_streams_are_what_the_formulas_say(ops, dtype, streams: int, hidden: int, iterations: int) -> None:
    """Sums of the projection have as many terms as a row; each of 20 norms adds a rounding or two."""
    shape = Hyper(streams, iterations, 1e-6, 1e-6)
    x, y = torch.randn(9, streams, hidden).to(dtype), torch.randn(9, hidden).to(dtype)
    ours = ops.bound(shape, weights_of(ops, shape, hidden), hidden)
    taken, mix = ours.entered(x)
    got = taken, mix.left(x, y), ours.summed(x)
    expected = in_double(shape, weights_of(ops, shape, hidden, double=True), x, y)
    slack = BF16_ULP if dtype is torch.bfloat16 else 0.0
    slack += ((streams * hidden) ** 0.5 + 4 * iterations + 8) * F32_ULP
    for result, right in zip(got, expected, strict=True):
        assert result.dtype is dtype
        torch.testing.assert_close(result.double(), right, rtol=slack, atol=4 * slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("streams", "hidden", "iterations"), SHAPES)
def test_a_row_does_not_depend_on_those_beside_it(ops, dtype, streams: int, hidden: int, iterations: int) -> None:
    if ops.tier.startswith("amx"):
        pytest.skip("float32 matrices are no tiles, but rows of AMX may differ in last bits")
    rows, shape = 2 * PIECE + 3, Hyper(streams, iterations, 1e-6, 1e-6)
    x, y = torch.randn(rows, streams, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
    ours = ops.bound(shape, weights_of(ops, shape, hidden), hidden)
    taken, mix = ours.entered(x)
    after, summed = mix.left(x, y), ours.summed(x)
    for span in (slice(0, 1), slice(5, 9), slice(PIECE - 2, PIECE + 2), slice(rows - 1, rows)):
        own, own_mix = ours.entered(x[span])
        assert torch.equal(own, taken[span]) and torch.equal(ours.summed(x[span]), summed[span])
        assert torch.equal(own_mix.left(x[span], y[span]), after[span])
        assert torch.equal(mix.of(torch.arange(rows)[span]).left(x[span], y[span]), after[span])


def test_plain_torch_agrees(ops) -> None:
    shape, hidden = Hyper(4, 20, 1e-6, 1e-6), 72
    x, y = torch.randn(5, 4, hidden), torch.randn(5, hidden)
    plain = TorchOps().bound(shape, weights_of(ops, shape, hidden), hidden)
    assert type(plain) is HyperStreams
    for each in (plain, ops.bound(shape, weights_of(ops, shape, hidden), hidden)):
        taken, mix = each.entered(x)
        expected = in_double(shape, weights_of(ops, shape, hidden, double=True), x, y)
        torch.testing.assert_close(taken.double(), expected[0], rtol=2.0**-18, atol=2.0**-18)
        torch.testing.assert_close(mix.left(x, y).double(), expected[1], rtol=2.0**-18, atol=2.0**-18)


def test_arrays_that_do_not_fit_are_refused() -> None:
    pool = _core.WorkerPool([-1])
    with pytest.raises(KernelError, match="must be positive"):
        _core.Streams(pool, "scalar", 0, 8, 1, 1e-6, 1e-6)
    core, x, rows = _core.Streams(pool, "scalar", 2, 8, 1, 1e-6, 1e-6), torch.zeros(3, 2, 8), torch.zeros(3)
    with pytest.raises(KernelError, match="wide"):
        core.widen(x, torch.zeros(3, 15), rows)
    few = torch.zeros(3, 7), rows, torch.zeros(7), torch.zeros(7)
    with pytest.raises(KernelError, match="fewer columns than weights are made of"):
        core.enter(x, *few, torch.zeros(3, 8), torch.zeros(3, 2), torch.zeros(3, 2, 2))
    with pytest.raises(KernelError, match="mixing"):
        core.leave(x, torch.zeros(3, 8), torch.zeros(3, 2), torch.zeros(3, 2, 3), x)
