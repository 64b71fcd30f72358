"""A safetensors file whose tensors are written piece by piece, in any order, from several threads.

The safetensors library writes a file from tensors that are all in memory; a shard of experts would be gigabytes. The
layout is the library's: 8 bytes of header length, JSON padded to 8 bytes, then tensors, those of the widest types
first, so that all are aligned (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.convert.methods import StoredPart
from tandem.errors import CheckpointError
from tandem.spec.small_files import sync_directory

_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


class ByteRange(NamedTuple):
    """Where a tensor's bytes go in a file."""

    part: StoredPart
    begin: int
    end: int


def part_bytes(name: str, part: StoredPart) -> int:
    """CheckpointError for a type whose size we do not know."""
    if part.dtype not in _BITS:
        raise CheckpointError(f"tensor {name} is stored as {part.dtype}, which cannot be copied")
    return torch.Size(part.shape).numel() * _BITS[part.dtype] // 8


class ShardLayout:
    """The bytes of a file's header, and where each tensor goes. Depends on `parts` alone, not on their order."""

    def __init__(self, parts: Mapping[str, StoredPart]) -> None:
        sizes = {name: part_bytes(name, part) for name, part in parts.items()}
        order = sorted(parts, key=lambda name: (-_BITS[parts[name].dtype], name))
        ends, end = {}, 0
        for name in order:
            end += sizes[name]
            ends[name] = end
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name in order:
            dtype, shape = parts[name]
            entries[name] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [ends[name] - sizes[name], ends[name]],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        first = len(self.header)
        self.places = {
            name: ByteRange(parts[name], first + ends[name] - sizes[name], first + ends[name]) for name in order
        }
        self.file_bytes = first + end

    def is_written(self, file: Path) -> bool:
        """Whether `file` is this shard, whole: shards get their name after their last byte is on the disk."""
        if not file.is_file() or file.stat().st_size != self.file_bytes:
            return False
        with file.open("rb") as stream:
            return stream.read(len(self.header)) == self.header


class ShardFile:
    """Use as a context; the file gets its name when the block ends well, and nothing is left when it does not."""

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self.path, self.layout = path, layout
        self._unfinished = path.with_name(f".{path.name}.part")

    def __enter__(self) -> ShardFile:
        self._file = os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.truncate(self._file, self.layout.file_bytes)
        _write_at(self._file, memoryview(self.layout.header), 0)
        return self

    def put(self, name: str, first_row: int, rows: Tensor) -> None:
        """Rows of tensor `name` from `first_row` on. Threads may call it at the same time."""
        place = self.layout.places[name]
        row_bytes = (place.end - place.begin) // max(1, place.part.shape[0])
        self.put_bytes(name, first_row * row_bytes, _bytes(rows))

    def put_bytes(self, name: str, offset: int, data: memoryview) -> None:
        place = self.layout.places[name]
        if not 0 <= offset <= offset + len(data) <= place.end - place.begin:
            raise CheckpointError(f"{len(data)} bytes at {offset} are outside tensor {name}")
        _write_at(self._file, data, place.begin + offset)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            os.fsync(self._file)
        os.close(self._file)
        if kind is None:
            os.replace(self._unfinished, self.path)
            sync_directory(self.path.parent)
        else:
            self._unfinished.unlink(missing_ok=True)


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
