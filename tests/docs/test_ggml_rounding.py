"""scripts/ggml_rounding.py without llama.cpp: codes of rows that end with a part of a block, each rounded once."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from repo_scripts import script_module
from tandem.formats.codes import WeightCodes
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.reference import decoded

script: ModuleType = script_module("ggml_rounding")
Q2_0 = (64, 18)  # weights, bytes; the gguf package does not have it yet
DEPTH = 576


def sizes(name: str) -> tuple[int, int]:
    return Q2_0 if name == "Q2_0" else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


class Library:
    """In place of libggml-base.so: numbers of types from 0 on, in the order of GGUF_CODES. Blocks are random bytes."""

    def __init__(self) -> None:
        self.ggml_type_name = lambda number: self._name(number).lower().encode() if number < len(GGUF_CODES) else None
        self.ggml_blck_size = lambda number: sizes(self._name(number))[0]
        self.ggml_row_size = self._row_size
        self.ggml_quantize_chunk = self._quantise

    def _name(self, number: int) -> str:
        return list(GGUF_CODES)[number]

    def _row_size(self, number: int, depth: int) -> int:
        block, nbytes = sizes(self._name(number))
        assert depth % block == 0
        return depth // block * nbytes

    def _quantise(self, number: int, source: int, target: int, first: int, rows: int, depth: int, *_: int) -> int:
        size = rows * self._row_size(number, depth)
        data = np.random.default_rng(number).integers(0, 60, size, np.uint8)
        ctypes.memmove(target, data.ctypes.data, size)
        return size


@dataclasses.dataclass
class Function:
    """A ctypes function takes its types as attributes, which a bound method has no room for."""

    call: Any

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)


@pytest.fixture
def ggml(monkeypatch: pytest.MonkeyPatch) -> Any:
    functions = {name: Function(call) for name, call in vars(Library()).items()}
    monkeypatch.setattr(script.ctypes, "CDLL", lambda _: SimpleNamespace(**functions))
    return script.Ggml(Path("libggml-base.so"))


@pytest.mark.parametrize("name", GGUF_CODES)
def test_a_part_of_a_block_has_the_whole_ones_numbers(ggml: Any, name: str) -> None:
    block, nbytes = sizes(name)
    whole = -(-DEPTH // block) * block
    assert ggml.bits(name) == 8 * nbytes / block
    expected = decoded(GGUF_CODES[name](ggml.blocks(name, torch.zeros(4, whole))))
    codes = ggml.codes(name, torch.zeros(4, DEPTH, dtype=torch.bfloat16))
    assert codes.shape == (4, DEPTH)
    torch.testing.assert_close(decoded(codes), expected[:, :DEPTH], rtol=0, atol=0, equal_nan=True)


class Layer:
    """A layer of experts, as `ops.experts` gives one."""

    def __init__(self) -> None:
        self.loaded: dict[int, tuple[WeightCodes, ...]] = {}

    def load_each(self, ids: list[int], experts: list[tuple[WeightCodes, ...]]) -> None:
        self.loaded |= dict(zip(ids, experts, strict=True))


def test_each_matrix_is_rounded_once_for_both_modes() -> None:
    """The second stream reads its own copy of the file."""
    rounded: list[Tensor] = []
    counted = SimpleNamespace(codes=lambda name, matrix: rounded.append(matrix) or len(rounded))
    rounding, layers = script.Rounding(counted, "Q4_K"), []
    experts = [tuple(torch.randn(2, 32) for _ in range(3)) for _ in range(4)]
    for int8_activations in (False, True):
        stream = SimpleNamespace(ops=SimpleNamespace(experts=lambda *_: Layer()))
        rounding.apply(stream, int8_activations)
        assert stream.ops.int8_activations is int8_activations
        layers.append(stream.ops.experts(4, 32, 2))
        layers[-1].load_each([0, 1, 2, 3], [tuple(matrix.clone() for matrix in each) for each in experts])
    assert len(rounded) == 12 and layers[0].loaded == layers[1].loaded
    assert len({code for each in layers[0].loaded.values() for code in each}) == 12
