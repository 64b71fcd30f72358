"""Streams in place of a residual, by kernels: against plain torch, in float32."""

from __future__ import annotations

import pytest
import torch

from gpu import AVAILABLE, DEVICE, needs_triton
from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Ops
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperWeights, RowNorm, StreamMix, StreamResult
from tandem.spec.state import LANES

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
CPU, HIDDEN = torch.device("cpu"), 200


def advanced(
    ops: Ops, device: torch.device, n: int, rows: int, leaves: bool, last: bool
) -> list[torch.Tensor]:
    """Streams, normed rows, and how a result returns; from the same random numbers every time."""
    g, shape = torch.Generator().manual_seed(5), Hyper(n, 20, 1e-6, 1e-6)

    def made(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=g).to(device)

    m = -(-(n if last else shape.weights) // LANES) * LANES
    weights = HyperWeights(ops.linear(made(m, n * HIDDEN).cpu() * 0.1, fmt="f32"), made(m), made(m) * 0.1)
    leaving = StreamResult(made(rows, HIDDEN), StreamMix(made(rows, n), made(rows, n, n))) if leaves else None
    streams, before = ops.bound(shape, weights, HIDDEN), made(rows, n, HIDDEN)
    out, x, mix = streams.advanced(before, leaving, RowNorm(made(HIDDEN), 1e-6, ops.rms_norm), last)
    assert (mix is None) == last
    return [each.cpu() for each in (out, x, *(() if mix is None else (mix.share, mix.mixing)))]


@pytest.mark.parametrize("rows", [1, 5, 40], ids=["one", "few", "many"])
@pytest.mark.parametrize("leaves", [False, True], ids=["first", "between"])
@pytest.mark.parametrize("last", [False, True], ids=["block", "end"])
@pytest.mark.parametrize("n", [3, 4])
def test_streams_advance_as_in_torch(n: int, last: bool, leaves: bool, rows: int) -> None:
    """float32; sums of 800 products are divided in other ways, and 20 norms multiply what that changes."""
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    expected = advanced(TorchOps(), CPU, n, rows, leaves, last)
    for mine, theirs in zip(advanced(ops, DEVICE, n, rows, leaves, last), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
