"""Every CUDA source is compiled to machine code for real GPUs, which takes NVRTC and no GPU; nothing is launched.

Two sources that are put together must not define the same thing twice: only a compiler sees that.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from covering import one_of_each
from tandem.formats.gpu_reading import MMA_CODES, MMA_SCALES
from tandem.kernels.gpu.mma import code_mma, expert_mma
from tandem.kernels.gpu.mma.mma_source import Kind
from tandem.kernels.gpu.nvrtc import COMMON
from tandem.kernels.gpu.prompts import code_product, wgmma_product
from tandem.kernels.gpu.ranks import lane
from tandem.mechanisms.delta_net.gpu import rows
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.spec.activation import SILU, Activation
from tandem.spec.norm import Norm

GPUS = (80, 86, 89, 90, 100, 120)
KINDS = [Kind(*each) for each in product(MMA_CODES, MMA_SCALES, (False, True))]
PLAIN = Kind("bf16", "none", False)
ONE_OF_EACH = [
    Kind("int4", "f32", True),
    Kind("int8", "bf16", False),
    Kind("fp8", "f32", True),
    Kind("fp4", "e8m0", True),
]
CLAMPED = Activation("swiglu_clamp", limit=7.0)


@cache
def nvrtc() -> ctypes.CDLL | None:
    """NVIDIA's compiler, from its own package or from what PyTorch brings along."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        for library in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(library))
    return None


pytestmark = pytest.mark.skipif(
    nvrtc() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc"
)


def compile_log(source: str, gpu: int, features: str = "") -> str:
    """What the compiler says of a source; nothing where it made machine code of it."""
    library, program = nvrtc(), ctypes.c_void_p()
    assert library is not None
    text = (COMMON + source).encode()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"source.cu", 0, None, None) == 0
    options = [b"--std=c++17", f"--gpu-architecture=sm_{gpu}{features}".encode()]
    failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode() or f"error {failed}" if failed else ""


BLOCKS, WIDE_BLOCKS = code_mma.MmaTiling(1, 1, 4, 4, 6), code_mma.MmaTiling(2, 2, 8, 2, 2)
FEW, MANY = code_product.ProductTiling(16, 4, 8, 4, 4), code_product.ProductTiling(64, 2, 3, 4, 2)
# Each program that experts and dense matrices of some codes may ask for, by what differs in its text.
PROGRAMS: dict[str, Callable[[Kind], str]] = {
    "rows": lambda kind: code_mma.source(kind, BLOCKS),
    "wide": lambda kind: code_mma.source(kind, WIDE_BLOCKS),
    "ready": lambda kind: code_mma.source(kind, code_mma.MmaTiling(2, 1, 16, 2, 1), SILU, ready=True),
    "experts": lambda kind: expert_mma.source(kind, SILU),
    "clamped": lambda kind: expert_mma.source(kind, CLAMPED),
    "few": lambda kind: code_product.source(kind, FEW, 1, None),
    "few-silu": lambda kind: code_product.source(kind, FEW, 1, SILU),
    "many": lambda kind: code_product.source(kind, MANY, 1, None),
    "many-silu": lambda kind: code_product.source(kind, MANY, 1, SILU),
}


def program_by_full(kind: Kind, program: str) -> Any:
    """All of them take minutes. Each kind meets some card with each sort of program below."""
    turn = list(PROGRAMS).index(program) % len(ONE_OF_EACH)
    marks = () if kind == ONE_OF_EACH[turn] else pytest.mark.full
    return pytest.param(kind, program, id="-".join(map(str, (*kind, program))), marks=marks)


def one_of_each_source(kind: Kind) -> list[str]:
    delta = DeltaRule(2, 4, rows.HEAD, rows.HEAD, 4, Norm(1e-6), "heads")
    blocks = code_mma.MmaTiling(1, 1, 4, 4, 6), code_product.ProductTiling(32, 4, 4, 4, 3)
    experts = expert_mma.source(kind), code_product.source(kind, blocks[1], 1, SILU)
    return [code_mma.source(kind, blocks[0]), *experts, rows.source(delta, 3, 2048)]


@pytest.mark.parametrize(("kind", "program"), [program_by_full(*each) for each in product(KINDS, PROGRAMS)])
def test_every_kind_of_codes_compiles(kind: Kind, program: str) -> None:
    assert compile_log(PROGRAMS[program](kind), 90) == ""


@pytest.mark.parametrize("gpu", GPUS)
def test_every_card_has_machine_code(gpu: int) -> None:
    for source in one_of_each_source(ONE_OF_EACH[GPUS.index(gpu) % len(ONE_OF_EACH)]):
        assert compile_log(source, gpu) == ""


PLAIN_FEW = code_product.ProductTiling(16, 2, 8, 4, 4)
PLAIN_PRODUCTS = {"few": (PLAIN_FEW, None), "few-silu": (PLAIN_FEW, SILU), "many-silu": (MANY, SILU)}


@pytest.mark.parametrize(("gpu", "product_name"), one_of_each(GPUS, PLAIN_PRODUCTS))
def test_a_product_of_plain_numbers_compiles(gpu: int, product_name: str) -> None:
    """Every card has products of codes above, from the same text."""
    blocks, ending = PLAIN_PRODUCTS[product_name]
    assert compile_log(code_product.source(PLAIN, blocks, 1, ending), gpu) == ""


@pytest.mark.parametrize("gpu", GPUS)
def test_the_lanes_between_ranks_compile(gpu: int) -> None:
    assert compile_log(lane.source(1, 4), gpu) == ""


def test_a_definition_that_comes_twice_is_found() -> None:
    assert "already been defined" in compile_log("__device__ void f() {}\n" * 2, 90)


def wgmma_source(kind: Kind, scale_steps: int, ending: Activation | None) -> str:
    rows = wgmma_product.MOST_ROWS
    stages = wgmma_product.STAGES_BYTES // wgmma_product.stage_bytes(kind, scale_steps, rows)
    assert stages >= 3  # one that is read, one that is there, one that is brought
    return wgmma_product.source(kind, wgmma_product.WarpgroupTiling(rows, stages, 2048, 18432), scale_steps, ending)


@pytest.mark.parametrize(
    ("kind", "scale_steps"),
    [(ONE_OF_EACH[0], 1), (ONE_OF_EACH[1], 1), (ONE_OF_EACH[2], 4), (ONE_OF_EACH[3], 1), (PLAIN, 1)],
    ids=str,
)
@pytest.mark.parametrize("ending", [SILU, Activation("relu2"), None], ids=["silu", "relu2", "none"])
def test_products_of_warpgroups_compile(kind: Kind, scale_steps: int, ending: Activation | None) -> None:
    assert compile_log(wgmma_source(kind, scale_steps, ending), 90, features="a") == ""
