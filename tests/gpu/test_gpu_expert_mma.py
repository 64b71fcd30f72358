"""Which matrices the CUDA kernels of experts take; the others are Triton's. No GPU is asked."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from gpu import HAS_TRITON, pretend_cuda_core

if HAS_TRITON:
    from tandem.kernels.gpu.mma import expert_mma
    from tandem.kernels.gpu.panels import Panels

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
GPU = torch.device("cuda:0")
STATIC_BYTES = 4 * 32 * 4  # `parts` of gate_up
CUDA_BYTES = 48 << 10  # of shared memory, without asking for more


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda_core(monkeypatch)


def panels(depth: int = 2048, group: int = 32) -> Panels:
    words = depth * 8
    return Panels("int4", 64, depth, depth, 4, words + depth // group * 32, words, "bf16", group)


def test_takes_codes_on_a_gpu(installed: None) -> None:
    assert expert_mma.reads(panels(), GPU)
    assert not expert_mma.reads(panels(), torch.device("cpu"))
    assert expert_mma.reads(replace(panels(), scales="f16"), GPU)
    assert expert_mma.reads(replace(panels(), fmt="fp8", scales="f32", group=0), GPU)
    assert not expert_mma.reads(replace(panels(), fmt="fp4", scales="e4m3", group=16), GPU)
    assert not expert_mma.reads(replace(panels(), fmt="bf16", scale_offset=0), GPU)
    assert not expert_mma.reads(replace(panels(), depth=2044), GPU)


def test_leaves_older_gpus_to_triton(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not expert_mma.reads(panels(), GPU)


def test_leaves_experts_to_triton_where_cuda_core_is_missing(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert not expert_mma.reads(panels(), GPU)


def test_takes_rows_that_fit_shared_memory(installed: None) -> None:
    most = expert_mma.MAX_DEPTH
    assert expert_mma.reads(panels(most), GPU) and not expert_mma.reads(panels(most + 32), GPU)
    unit = 2 * expert_mma.ROW_UNITS
    assert -(-2 * most // unit) * unit + STATIC_BYTES <= CUDA_BYTES
