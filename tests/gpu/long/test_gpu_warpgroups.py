"""Whole warpgroups (wgmma) multiply a model's experts in prompts: its logits are those of the CPU in float32.

The tolerance is the error that bfloat16 has on the CPU, half as much again, as in test_gpu_engine.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu import DEVICE, needs_cuda
from gpu_sessions import Session, on_the_cpu, rms
from tandem.spec.gpu_scratch import HOPPER
from tiny import VARIANTS, save_tiny, settings

pytestmark = [pytest.mark.gpu, needs_cuda]
WIDE = "qwen3_moe-64"


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that wgmma reads: whole chunks of 64 k."""
    family, changes = VARIANTS["qwen3_moe"]
    sizes = settings(hidden_size=128, moe_intermediate_size=64, num_experts=8)
    path = tmp_path_factory.mktemp("wide") / WIDE
    VARIANTS[WIDE] = family, changes | sizes
    try:
        save_tiny(WIDE, path)
    finally:
        del VARIANTS[WIDE]
    return path


@pytest.mark.parametrize("fmt", ["bf16", "int4"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_prompts_by_whole_warpgroups(
    wide_model: Path, monkeypatch: pytest.MonkeyPatch, share: float, fmt: str
) -> None:
    if torch.cuda.get_device_capability(DEVICE) != HOPPER:
        pytest.skip("only Hopper has wgmma")
    from tandem.kernels import which
    from tandem.kernels.gpu.prompts import wgmma_product

    calls, activated = list[int](), wgmma_product.activated

    def counted(x: torch.Tensor, *others: object) -> torch.Tensor:
        calls.append(len(x))
        return activated(x, *others)

    monkeypatch.setattr(wgmma_product, "activated", counted)
    monkeypatch.setattr(which, "WGMMA_LEAST_PAIRS", 1 << 30)
    others = Session(wide_model, share, (), fmt=fmt).logits(True)
    assert not calls
    monkeypatch.undo()
    monkeypatch.setattr(wgmma_product, "activated", counted)
    ours = Session(wide_model, share, (), fmt=fmt).logits(True)
    assert calls  # 63 pairs of an expert
    exact, rounded = on_the_cpu(wide_model, "float32"), on_the_cpu(wide_model, "bfloat16")
    if fmt == "bf16":
        assert rms(ours, exact) < 1.5 * rms(rounded, exact)
    assert rms(ours, others) < 1.5 * rms(rounded, exact)
