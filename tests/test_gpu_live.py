"""Exchanges between a real layer's GPU experts and its CPU experts (on a GPU, or interpreted with fake copies).

The placement changes between calls, the result does not: each call is compared with all experts on the CPU. Tolerances
as in test_gpu_ops.py: hidden activations and the sum are rounded to bfloat16, 2^-8 each on average even in the
interpreter, which cuts bits off.
"""

from __future__ import annotations

import pytest
import torch

from fake_copies import FakeCopies
from gpu import AVAILABLE, DEVICE, needs_triton
from tandem import _core
from tandem.experts.live_copies import Copies, CudaCopies
from tandem.experts.live_exchange import LiveExchange
from tandem.experts.live_policy import Exchange
from tandem.experts.placement import place
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Routing

if AVAILABLE:
    from tandem.experts.handoff import Handoff, HandoffSizes
    from tandem.experts.hybrid_store import HybridStore
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS = 8, 64, 48, 3, 4


def copies() -> Copies:
    return CudaCopies(DEVICE) if DEVICE.type == "cuda" else FakeCopies()


def arrive(made: Copies) -> None:
    if isinstance(made, FakeCopies):
        made.arrive(1.0)
    else:
        torch.cuda.synchronize()


@pytest.mark.parametrize("fmt", ["bf16", "int4"])
def test_exchanges_do_not_change_what_a_layer_computes(fmt: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))
    handoff = Handoff(HandoffSizes(TOKENS, TOKENS, HIDDEN, TOP_K), DEVICE, 20.0)
    store = HybridStore(ops, place("uniform", 1, EXPERTS, 3), handoff, HIDDEN, live=True)
    layer = store.layer(0, EXPERTS, WIDTH, fmt)
    layer.load(EXPERTS, lambda e: (gate[e], up[e], down[e]))
    static = ops.cpu.experts(EXPERTS, HIDDEN, WIDTH, fmt)
    for e in range(EXPERTS):
        static.load(e, gate[e], up[e], down[e])

    dma = copies()
    exchange = LiveExchange([layer.sides], dma, 1 << 30)
    where = list(range(3))  # the expert in each slot
    for step in range(8):
        x = torch.randn(TOKENS, HIDDEN).bfloat16()
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
        weights = torch.rand(TOKENS, TOP_K)
        routing = Routing(ids.to(DEVICE), weights.to(DEVICE))
        got = layer.wait(layer.submit(x.to(DEVICE), routing)).float().cpu()
        expected = static.forward(x.float(), ids, weights)
        torch.testing.assert_close(got, expected, rtol=2.0**-6, atol=2.0**-6)
        assert (got - expected).norm() < 2 * 2.0**-8 * expected.norm()

        slot = step % 3
        coming = next(e for e in range(step, step + EXPERTS) if e % EXPERTS not in where) % EXPERTS
        wanted = Exchange(0, slot, where[slot], coming)
        exchange.add([wanted])
        assert not exchange.advance().done
        arrive(dma)
        assert exchange.advance().done == [wanted]
        where[slot] = coming
    assert layer.sides is not None and layer.sides.cpu.loaded == EXPERTS - 3
