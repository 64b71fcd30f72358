"""Which matrices of codes the CUDA kernels take, and how they divide them; the others are Triton's. No GPU is asked."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import kernel_cases as cases
from gpu import HAS_TRITON, pretend_cuda_core
from kernel_cases import DENSE_FORMATS, coded
from tandem.kernels.packed.matrix import PackedMatrix
from tandem.spec.activation import SILU, Activation

if HAS_TRITON:
    from tandem.kernels.gpu.mma import code_mma, expert_mma, mma_source
    from tandem.kernels.gpu.panels import Panels

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
GPU = torch.device("cuda:0")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda_core(monkeypatch)


def panels(fmt: str, depth: int = 256, columns: int = 40) -> Panels:
    packed = PackedMatrix.from_codes(cases.workspace_of("scalar"), coded(columns, depth, fmt))
    return Panels(*packed.layout())


@pytest.mark.parametrize("fmt", DENSE_FORMATS)
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


@pytest.mark.parametrize("fmt", ["int4", "fp8"])
@pytest.mark.parametrize("count", [2, 128, 256, 300, 768, 9496])
def test_a_division_holds_the_rows_and_a_matrix_keeps_its_warps(fmt: str, count: int) -> None:
    """Warps decide the order of sums; what blocks share must fit static shared memory."""
    matrix = replace(panels(fmt), panels=count)
    divisions = {rows: code_mma.blocks_of(matrix, rows, 132) for rows in range(1, code_mma.MOST_ROWS + 1)}
    assert len({blocks.warps for blocks in divisions.values()}) == 1
    for rows, blocks in divisions.items():
        assert blocks.tiles * code_mma.TILE_ROWS >= rows
        assert blocks.warps * blocks.tiles * code_mma.TILE_ROWS * blocks.panels * 16 * 4 <= 48 << 10
        assert count // blocks.panels >= min(count, 132)


def test_what_steps_need_is_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: set[code_mma.MmaTiling] = set()
    monkeypatch.setattr(code_mma, "kernel", lambda kind, blocks, index, _: compiled.add(blocks))
    monkeypatch.setattr(code_mma, "_processors", lambda device: 132)
    for columns in (40, 2080):
        made = panels("fp8", columns=columns)
        code_mma.prepare(made, GPU)
        needed = {code_mma.blocks_of(made, r, 132) for r in range(1, code_mma.MOST_ROWS + 1)}
        assert needed <= compiled


@pytest.mark.parametrize("fmt", ["int4", "fp8"])
@pytest.mark.parametrize("count", [2, 64, 176, 300, 2304])
def test_pairs_of_gate_and_up_hold_the_rows_and_keep_their_warps(fmt: str, count: int) -> None:
    matrix = replace(panels(fmt), panels=count)
    divisions = {rows: code_mma.pairs_of(matrix, rows, 132) for rows in range(1, code_mma.MOST_PAIRED_ROWS + 1)}
    assert len({(blocks.warps, blocks.panels) for blocks in divisions.values()}) == 1
    for rows, blocks in divisions.items():
        assert blocks.panels == 2 and blocks.tiles * code_mma.TILE_ROWS >= rows
        assert blocks.warps * blocks.tiles * code_mma.TILE_ROWS * blocks.panels * 16 * 4 <= 48 << 10


@pytest.mark.parametrize("columns, whole", [(32, True), (64, True), (48, False), (40, False)])
def test_only_whole_panels_of_gate_and_up_are_paired(columns: int, whole: bool) -> None:
    assert code_mma.pairs(panels("fp8", columns=columns), SILU) == whole
    assert not code_mma.pairs(panels("fp8", columns=columns), Activation("relu2"))


def test_what_pairs_need_is_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: set[tuple[code_mma.MmaTiling, Activation, bool]] = set()
    monkeypatch.setattr(code_mma, "kernel", lambda kind, *which: compiled.add((which[0], *which[2:])))
    monkeypatch.setattr(code_mma, "_processors", lambda device: 132)
    for columns in (64, 8192):
        made = panels("fp8", columns=columns)
        code_mma.prepare_pairs(made, SILU, GPU)
        rows = range(1, code_mma.MOST_PAIRED_ROWS + 1)
        needed = {(code_mma.pairs_of(made, r, 132), SILU, ready) for r in rows for ready in (False, True)}
        assert needed <= compiled


@pytest.mark.parametrize("fmt", ["int4", "fp8", "mxfp4", "int8 rows"])
def test_a_kernels_source_is_for_one_kind(fmt: str) -> None:
    kind = mma_source.kind_of(panels(fmt))
    assert kind.grouped == (fmt != "int8 rows")
    blocks = code_mma.blocks_of(panels(fmt), 4, 132)
    for text in (code_mma.source(kind, blocks), expert_mma.source(kind)):
        assert f"#define FORMAT {mma_source.FORMATS[kind.fmt]}\n" in text
        assert f"#define SCALE {mma_source.SCALES[kind.scale]}\n" in text
    assert "#define PAIRED 0\n" in code_mma.source(kind, blocks)
    paired = code_mma.source(kind, blocks, Activation("swiglu_oai", 1.702, 7.0))
    assert "#define PAIRED 1\n" in paired and "#define ALPHA 1.702f\n" in paired


@pytest.mark.parametrize(("group", "shift"), [(0, 0), (32, 0), (64, 1), (128, 2), (256, 3)])
def test_groups_are_whole_steps(group: int, shift: int) -> None:
    assert mma_source.group_shift(replace(panels("int4"), group=group)) == shift
