"""Which matrices of codes the CUDA kernels take, and how they divide them; the others are Triton's. No GPU is asked."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import kernel_cases as cases
from gpu import HAS_TRITON
from tandem.kernels.packed_matrix import PackedMatrix
from test_gpu_dense_codes import FORMATS, coded

if HAS_TRITON:
    from tandem.kernels.gpu import code_mma
    from tandem.kernels.gpu.panels import Panels

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
GPU = torch.device("cuda:0")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ModuleType("cuda.core")
    for name in ("Device", "LaunchConfig", "Program", "Stream", "launch"):
        setattr(core, name, None)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def panels(fmt: str, depth: int = 256) -> Panels:
    packed = PackedMatrix.from_codes(cases.workspace_of("scalar"), coded(40, depth, fmt))
    return Panels(*packed.layout())


@pytest.mark.parametrize("fmt", FORMATS)
def test_takes_every_format_whose_groups_are_whole_steps(installed: None, fmt: str) -> None:
    assert code_mma.reads(panels(fmt), GPU) == (fmt != "nvfp4")
    assert not code_mma.reads(panels(fmt), torch.device("cpu"))


def test_leaves_what_it_cannot_read_to_triton(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = panels("fp8")
    assert not code_mma.reads(panels("fp8", 100), GPU)  # rows of no whole units of 16 bytes
    assert not code_mma.reads(replace(fp8, fmt="bf16", scale_offset=0), GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not code_mma.reads(fp8, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert not code_mma.reads(fp8, GPU)


def test_all_processors_have_a_block_before_blocks_grow() -> None:
    assert [code_mma.panels_each(768, rows, 132) for rows in (1, 2, 8, 9, 16)] == [1, 2, 2, 4, 4]
    assert [code_mma.panels_each(300, rows, 132) for rows in (1, 8, 16)] == [1, 2, 2]
    assert [code_mma.panels_each(128, rows, 132) for rows in (1, 8, 16)] == [1, 1, 1]


@pytest.mark.parametrize(("fmt", "scale"), [("int4", "bf16"), ("fp8", "f32"), ("fp4", "e8m0")])
def test_a_kernels_source_is_for_one_format(fmt: str, scale: str) -> None:
    text = code_mma.source(fmt, scale)
    assert f"#define FORMAT {code_mma.FORMATS[fmt]}\n" in text
    assert f"#define SCALE {code_mma.SCALES[scale]}\n" in text
