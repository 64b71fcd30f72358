"""Rounds experts to GGUF's types while they are loaded, by llama.cpp's own code: libggml-base.so."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.formats.gguf_blocks import GGUF_CODES

if TYPE_CHECKING:
    from tandem.formats.codes import WeightCodes
    from tandem.quality.stream import LayerStream

_Size, _Pointer, _Long = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64


class Ggml:
    """llama.cpp's quantisers by a type's name, such as Q4_K."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name, result, arguments in (
            ("ggml_type_name", ctypes.c_char_p, [ctypes.c_int]),
            ("ggml_blck_size", _Long, [ctypes.c_int]),
            ("ggml_row_size", _Size, [ctypes.c_int, _Long]),
            ("ggml_quantize_chunk", _Size, [ctypes.c_int, _Pointer, _Pointer, _Long, _Long, _Long, _Pointer]),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._types = self._numbers()

    def _numbers(self) -> dict[str, int]:
        """ggml's number of each type that Tandem reads. Names are asked for one by one: the library has no list."""
        names = {name.lower(): name for name in GGUF_CODES}
        numbers = {}
        for number in range(64):
            name = (self._library.ggml_type_name(number) or b"").decode().lower()
            if name in names:
                numbers[names[name]] = number
            if len(numbers) == len(names):
                break
        return numbers

    def block(self, name: str) -> int:
        """Weights of a block."""
        return int(self._library.ggml_blck_size(self._types[name]))

    def bits(self, name: str) -> float:
        """Bits per weight in a file."""
        return float(8 * self._library.ggml_row_size(self._types[name], self.block(name)) / self.block(name))

    def blocks(self, name: str, rows: Tensor) -> Tensor:
        """rows float32 [N, whole blocks] → uint8 [N, bytes]. All weights are as important: some types ask for that."""
        numbers, depth = np.ascontiguousarray(rows.numpy()), rows.shape[1]
        data = np.zeros((len(rows), self._library.ggml_row_size(self._types[name], depth)), np.uint8)
        alike = np.ones(depth, np.float32)
        addresses = numbers.ctypes.data, data.ctypes.data
        self._library.ggml_quantize_chunk(
            self._types[name], *addresses, 0, len(rows), depth, alike.ctypes.data
        )
        return torch.from_numpy(data)

    def codes(self, name: str, matrix: Tensor) -> WeightCodes:
        """[N, K] → its codes. A last block that K does not fill is filled up with zeros, which are cut off again."""
        depth = matrix.shape[1]
        whole = GGUF_CODES[name](self.blocks(name, pad(matrix.float(), (0, -depth % self.block(name)))))
        cut = {
            field.name: value[:, : -(-value.shape[1] * depth // whole.depth)].contiguous()
            for field in dataclasses.fields(whole)
            if isinstance(value := getattr(whole, field.name), Tensor) and value.dim() == 2
        }
        return dataclasses.replace(whole, **cut, depth=depth)


class Rounding:
    """Experts of a type. Each matrix is rounded once, and its codes are kept for the next stream: 0.3 GB."""

    def __init__(self, ggml: Ggml, name: str) -> None:
        self._ggml, self._name = ggml, name
        self._kept: dict[bytes, WeightCodes] = {}

    def apply(self, stream: LayerStream, int8_activations: bool) -> None:
        """The stream's experts become this type's codes as they are loaded, and are multiplied as they are."""
        ops = vars(stream.ops)
        ops["int8_activations"], make = int8_activations, stream.ops.experts

        def experts(*sizes: Any, **named: Any) -> Any:
            layer = make(*sizes, **named)
            load_each = layer.load_each
            vars(layer)["load_each"] = lambda ids, each: load_each(ids, self._rounded(each))
            return layer

        ops["experts"] = experts

    def _rounded(self, experts: Sequence[Sequence[Tensor]]) -> list[tuple[WeightCodes, ...]]:
        """Matrices of each expert on all cores: the library's code lets other threads run."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            futures = [[threads.submit(self._codes, matrix) for matrix in each] for each in experts]
            return [tuple(future.result() for future in each) for each in futures]

    def _codes(self, matrix: Tensor) -> WeightCodes:
        key = hashlib.blake2b(matrix.contiguous().view(torch.uint8).numpy(), digest_size=16).digest()
        if key not in self._kept:
            self._kept[key] = self._ggml.codes(self._name, matrix)
        return self._kept[key]
