"""Experts of every shape on the GPU: activations, biases, no gate; against the CPU kernels on the same packed bytes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from kernel_cases import stored
from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ExpertBiases, Ops
from tandem.spec.activation import Activation, ActivationKind

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.kernels.which import FEW_TOKENS

pytestmark = [pytest.mark.gpu, needs_triton]
EXPERTS, HIDDEN, ROWS, TOP_K = 6, 64, 48, 3
LIMIT = 0.7  # it cuts many values
BF16_ULP = 2.0**-7


@pytest.fixture(scope="module")
def ops() -> Ops:
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))


def experts_of(ops: Ops, how: Activation, fmt: str) -> list:
    """The same experts on the GPU, but for the first one, and on the CPU."""
    g = torch.Generator().manual_seed(1)
    width = ROWS if how.gated else 2 * ROWS
    gate, up = 2 * torch.randn(2, EXPERTS, ROWS, HIDDEN, generator=g) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, width, generator=g) / width**0.5
    biases = ExpertBiases(
        torch.randn(EXPERTS, ROWS, generator=g),
        torch.randn(EXPERTS, ROWS, generator=g),
        torch.randn(EXPERTS, HIDDEN, generator=g),
    )
    slot_of = torch.arange(EXPERTS, dtype=torch.int32) - 1
    numbers = fmt if fmt in ("bf16", "int4") else "bf16"
    ours = ops.gpu_experts(slot_of, HIDDEN, width, numbers, how)
    theirs = ops.cpu.experts(EXPERTS, HIDDEN, width, numbers, how)
    for e in range(EXPERTS):
        matrices = [m[e] if fmt == numbers else stored(m[e], fmt, 32) for m in (gate, up, down)]
        theirs.load(e, *matrices)
        if e:
            ours.load(e, *matrices)
    for layer in (ours, theirs):
        layer.set_biases(biases)
    return [ours, theirs]


def near(got: Tensor, expected: Tensor) -> None:
    """Intermediate activations and the sum are rounded to bfloat16, and scaled weights of tiles; what is added up is
    about as large as the largest result. Triton's interpreter does not round to bfloat16 but cuts off, which loses up
    to twice as much."""
    factor, largest = 2.0 if INTERPRETED else 1.0, float(expected.abs().max())
    torch.testing.assert_close(
        got.cpu().float(), expected, rtol=2 * BF16_ULP, atol=factor * 2.0**-8 * largest
    )
    assert (got.cpu().float() - expected).norm() < factor * 1.5 * 2.0**-8 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 5, 40])  # more: test_gpu_prompts.py
@pytest.mark.parametrize("fmt", ["bf16", "int4", "mxfp4", "int4_zeros"])
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_activations_and_biases(ops: Ops, kind: ActivationKind, fmt: str, tokens: int) -> None:
    if INTERPRETED and tokens > FEW_TOKENS:
        pytest.skip("tiles multiply bfloat16, which Triton's interpreter takes for integers")
    ours, theirs = experts_of(ops, Activation(kind, 1.702, LIMIT), fmt)
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, TOP_K, generator=g)
    got = ours.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    near(got, theirs.forward(x.float(), torch.where(ids == 0, -1, ids), weights))


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_dense_mlps(ops: Ops, kind: ActivationKind, tokens: int) -> None:
    how = Activation(kind, 1.702, LIMIT)
    width = ROWS if how.gated else 2 * ROWS
    ours, theirs = (make.mlp(HIDDEN, width, "bf16", how) for make in (ops, ops.cpu))
    matrices = [torch.randn(n, k) / k**0.5 for n, k in ((ROWS, HIDDEN), (ROWS, HIDDEN), (HIDDEN, width))]
    for mlp in (ours, theirs):
        mlp.load(*matrices)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    near(ours(x.to(DEVICE)), theirs(x.float()))


@pytest.mark.parametrize("fmt", ["bf16", "int4"])
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_what_is_no_number_stays_none(ops: Ops, kind: ActivationKind, fmt: str) -> None:
    """A clamp must not make a limit of it."""
    ours, _ = experts_of(ops, Activation(kind, 1.702, LIMIT), fmt)
    x = torch.full((1, HIDDEN), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.ones(1, 1, dtype=torch.int32, device=DEVICE)
    assert ours.forward(x, ids, torch.ones(1, 1, device=DEVICE)).isnan().all()
