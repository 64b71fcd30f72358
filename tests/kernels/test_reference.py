"""`TorchOps` says what packed quantised weights stand for: to the bit, and through a whole model."""

from __future__ import annotations

import pytest
import torch

from sessions import Session, ours, reference, rms
from tandem import _core
from tandem.errors import KernelError
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps, round_to_format


@pytest.mark.parametrize("tier", _core.supported_tiers())
@pytest.mark.parametrize("fmt", ["f32", "bf16", "int8", "int4"])
def test_packed_weights_stand_for_what_the_reference_says(fmt, tier):
    weight = torch.randn(45, 100, generator=torch.Generator().manual_seed(1))
    weight[3, :32] = 0.0
    weight[7] = torch.arange(100) - 50.0
    packed = CpuOps(_core.WorkerPool([-1]), tier).linear(weight, None, fmt).dequantised()
    assert torch.equal(packed, round_to_format(weight, fmt).float())


def test_an_unknown_format_is_refused():
    with pytest.raises(KernelError, match="'fp3'; these exist: bf16, f32, int8, int4"):
        round_to_format(torch.zeros(2, 2), "fp3")


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_quantised_experts_agree_through_a_model(tiny_models, fmt):
    """Packed kernels and reference round weights alike; what is left is bf16's error, as Transformers has it."""
    path = tiny_models["qwen3_moe"]
    exact = reference(path)
    bf16_error = rms(reference(path, torch.bfloat16), exact)
    core = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    packed, plain = (ours(Session(path, "bfloat16", ops=o, expert_format=fmt)) for o in (core, TorchOps()))
    assert rms(packed, plain) < 1.5 * bf16_error
