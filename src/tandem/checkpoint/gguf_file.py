"""`GGUFFile`: one GGUF file: its metadata as Python values, its tensors as places in the mapped file.

The layout is that of the GGUF specification (ggml/docs/gguf.md), versions 2 and 3, little-endian. Every count and
length is checked against what is left of the file before anything is read or allocated. The `gguf` package's own reader
keeps a numpy array per metadata element (160 MB for a vocabulary of 49,152) and believes every count.
"""

from __future__ import annotations

import math
import mmap
import struct
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from tandem.checkpoint.mapped.pages import Pages
from tandem.errors import CheckpointError
from tandem.spec.small_files import lfs_pointer, unreadable

MAGIC = b"GGUF"
HEADER_LIMIT = 64 << 20  # bytes of metadata and tensor list; the largest vocabularies take 20 MB
MOST_ELEMENTS = 4 << 20  # of one array; the largest vocabularies have 0.3 M tokens and 0.6 M merges
MOST_DIMENSIONS = 4  # ggml's own limit
DEFAULT_ALIGNMENT = 32
Q2_0 = "Q2_0"  # llama.cpp's, which the `gguf` package does not know
BLOCK_TYPES = {
    int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES
} | {42: (Q2_0, 64, 18)}
"""By number: ggml's name of a block type, weights and bytes of a block."""
STRING, ARRAY, FLOAT32, BOOL = 8, 9, 6, 7
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", FLOAT32: "<f4", BOOL: "<u1", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is torch's order, rows before columns; `kind` is ggml's name: "F32", "Q4_K" …"""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of `shape[-1]` weights."""
        return self.nbytes // max(1, math.prod(self.shape[:-1]))


class GGUFFile:
    """Maps the file. Raises CheckpointError naming it when it is truncated or is not GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self.size = len(self._map)
        header = _Header(self._map, min(self.size, HEADER_LIMIT), path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read(header)
        except (struct.error, UnicodeDecodeError) as error:
            raise header.broken(str(error)) from error
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self._bytes = torch.from_numpy(np.frombuffer(self._map, np.uint8))

    def data(self, tensor: GGUFTensor) -> Tensor:
        """The tensor's bytes as they are stored, uint8 [bytes]: a view of the mapped file."""
        return self._bytes[tensor.start : tensor.start + tensor.nbytes]

    def pages(self, tensor: GGUFTensor) -> Pages:
        """Where the tensor lies in memory."""
        begin = self._bytes.data_ptr() + tensor.start
        return begin, begin + tensor.nbytes

    def _read(self, header: _Header) -> None:
        tensors, pairs = header.counts()
        for _ in range(pairs):
            key = header.string()
            if key in self.metadata:
                raise header.broken(f"key {key} is there twice")
            self.metadata[key] = header.value(header.number("<u4"))
        infos = [header.tensor_info() for _ in range(tensors)]
        alignment = self._alignment(header)
        start = -(-header.at // alignment) * alignment
        for info in infos:
            if info.offset % alignment:
                raise header.broken(f"tensor {info.name} lies at {info.offset}, no multiple of {alignment}")
            self._place(info, start, header)
        self._check_overlaps(header)

    def _alignment(self, header: _Header) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise header.broken(f"general.alignment is {alignment!r}, not a power of two from 8 on")
        return alignment

    def _place(self, info: _TensorInfo, start: int, header: _Header) -> None:
        name, start = info.name, start + info.offset
        if name in self.tensors:
            raise header.broken(f"tensor {name} is there twice")
        kind, nbytes = _kind_and_bytes(info, header)
        if start + nbytes > self.size:
            rest = start + nbytes - self.size
            raise header.broken(f"tensor {name} ends {rest} bytes after the file does{_of_fork(kind)}")
        self.tensors[name] = GGUFTensor(name, kind, info.shape, start, nbytes)

    def _check_overlaps(self, header: _Header) -> None:
        ordered = sorted(self.tensors.values(), key=lambda tensor: tensor.start)
        for first, second in pairwise(ordered):
            if first.start + first.nbytes > second.start:
                raise header.broken(f"tensors {first.name} and {second.name} overlap{_of_fork(first.kind)}")


def _of_fork(kind: str) -> str:
    """Why a tensor of that kind may be smaller than it should be."""
    return " (Q2_0 has blocks of 64 weights in llama.cpp, of 128 in a fork)" if kind == Q2_0 else ""


class _TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # from the start of all data


class _Header:
    """A cursor over the metadata that never leaves it."""

    def __init__(self, data: mmap.mmap, end: int, path: Path) -> None:
        self._data, self._end, self._path, self.at = data, end, path, 0

    def broken(self, why: str) -> CheckpointError:
        pointer = lfs_pointer(self._path)
        return pointer or CheckpointError(f"{self._path} is truncated or not GGUF ({why}): copy it again")

    def counts(self) -> tuple[int, int]:
        """Magic, version; (tensors, metadata pairs)."""
        if self._end < 4 or self._data[:4] != MAGIC:
            raise self.broken("it does not begin with 'GGUF'")
        self.at = 4
        version = self.number("<u4")
        if version not in (2, 3):
            why = "it is big-endian" if version & 0xFFFF == 0 else f"version {version} is not 2 or 3"
            raise CheckpointError(f"{self._path}: {why}: convert it with today's llama.cpp")
        tensors, pairs = self.number("<u8"), self.number("<u8")
        self._check_room(
            tensors, 24, "tensors"
        )  # the least that one takes: name length, dimensions, kind, offset
        self._check_room(pairs, 13, "metadata keys")
        return tensors, pairs

    def number(self, dtype: str) -> int:
        kind = np.dtype(dtype)
        return int(np.frombuffer(self._take(kind.itemsize), kind)[0])

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._advance(8))
        return self._take(length).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value. Float32 becomes the shortest decimal that rounds to it: 1e-05, as config.json says it."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(depth)
        values = self._scalars(kind, 1)
        return values[0]

    def tensor_info(self) -> _TensorInfo:
        name, dimensions = self.string(), self.number("<u4")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self.broken(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self.number("<u8") for _ in range(dimensions))
        if not all(shape):
            raise self.broken(f"tensor {name} has no elements")
        return _TensorInfo(name, shape[::-1], self.number("<u4"), self.number("<u8"))

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.number("<u4"), self.number("<u8")
        if count > MOST_ELEMENTS or depth > 3:
            raise self.broken(f"an array of {count} elements in its metadata")
        if kind == STRING:
            self._check_room(count, 8, "strings")
            return [self.string() for _ in range(count)]
        if kind == ARRAY:
            self._check_room(count, 12, "arrays")
            return [self._array(depth + 1) for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise self.broken(f"metadata of unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        array = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind == BOOL:
            return [bool(value) for value in array]
        return [float(str(value)) for value in array] if kind == FLOAT32 else array.tolist()

    def _check_room(self, count: int, each: int, what: str) -> None:
        if count * each > self._end - self.at:
            raise self.broken(f"{count} {what} do not fit")

    def _advance(self, count: int) -> int:
        start = self.at
        if count > self._end - start:
            raise self.broken(f"{count} bytes are missing at {start}")
        self.at = start + count
        return start

    def _take(self, count: int) -> bytes:
        start = self._advance(count)
        return self._data[start : start + count]


def _kind_and_bytes(info: _TensorInfo, header: _Header) -> tuple[str, int]:
    """ggml's name of the tensor's block type and the bytes that it takes."""
    if info.kind not in BLOCK_TYPES:
        raise header.broken(f"tensor {info.name} is of unknown type {info.kind}")
    name, weights, size = BLOCK_TYPES[info.kind]
    if (width := info.shape[-1]) % weights:
        raise header.broken(f"tensor {info.name}: rows of {width} are no multiple of {name}'s {weights}")
    return name, math.prod(info.shape) // weights * size
