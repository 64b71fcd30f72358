"""`StoredRows`: where the rows of a table lie, and what their bytes stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.checkpoint.mapped.shard import TORCH_DTYPES
from tandem.checkpoint.mapped.tensors import MappedTensors
from tandem.checkpoint.parts import TensorPart, is_table
from tandem.errors import CheckpointError
from tandem.spec.stored import StoredFormat

_SHARD = re.compile(r"\.shard_(\d+)\.weight$")
READABLE = ("BF16", "F16", "F32", "F8_E4M3")

Decode = Callable[[Tensor], Tensor]
"""uint8 [n, row bytes] → numbers [n, width], of the stored type, or float32 where a scale belongs to them."""


class RowRange(NamedTuple):
    """Rows of a table that lie one behind the other in a file, from byte `begin` on."""

    path: Path
    begin: int
    rows: int


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A table as its files have it. name: for messages; anywhere: `decode` takes rows on any device."""

    name: str
    pieces: tuple[RowRange, ...]
    row_bytes: int
    decode: Decode
    anywhere: bool = False

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def stored_rows(tensors: MappedTensors, module: str, shape: tuple[int, int]) -> StoredRows:
    """Stored rows of the table `module`, [rows, width], in one tensor or in several, `shard_0`, `shard_1`, ….

    Raises CheckpointError: it is absent, of another shape, or stored in a way that cannot be read row by row.
    """
    names = _names(tensors, module)
    parts = [tensors.part(name) for name in names]
    for part in parts:
        if part.dtype not in READABLE or part.dtype != parts[0].dtype:
            raise part.wrong(f"is stored as {part.dtype}; a table is read as one of {', '.join(READABLE)}")
        if len(part.shape) != 2 or part.shape[1] != shape[1]:
            raise part.wrong(f"has shape {part.shape}, but config.json implies rows of {shape[1]}")
    if sum(part.shape[0] for part in parts) != shape[0]:
        count = sum(part.shape[0] for part in parts)
        raise parts[-1].wrong(f"ends a table of {count} rows, but config.json implies {shape[0]}")
    pieces = tuple(
        RowRange(part.file, tensors.byte_range(name)[0], part.shape[0]) for name, part in zip(names, parts, strict=True)
    )
    dtype = TORCH_DTYPES[parts[0].dtype]
    return StoredRows(module, pieces, shape[1] * dtype.itemsize, _decode(tensors, module, parts[0], dtype), True)


def stored_tables(tensors: MappedTensors) -> StoredFormat:
    """Format of all tables together, for the planner."""
    parts = [tensors.part(name) for name in tensors.names() if is_table(name) and name.endswith(".weight")]
    if not parts:
        return StoredFormat()
    for part in parts:
        if part.dtype not in READABLE:
            raise part.wrong(f"is stored as {part.dtype}; a table is read as one of {', '.join(READABLE)}")
    bits = {part.dtype: 8 * TORCH_DTYPES[part.dtype].itemsize for part in parts}
    return StoredFormat(name=" + ".join(map(str.lower, bits)), bytes_per_weight=max(bits.values()) / 8)


def _names(tensors: MappedTensors, module: str) -> list[str]:
    if f"{module}.weight" in tensors:
        return [f"{module}.weight"]
    shards = dict(_shards(tensors, module))
    if not shards:
        raise CheckpointError(f"{tensors.path} has no tensor {module}.weight, and no {module}.shard_0.weight")
    if missing := set(range(len(shards))) - set(shards):
        raise CheckpointError(f"{tensors.path} has no tensor {module}.shard_{min(missing)}.weight")
    return [shards[i] for i in range(len(shards))]


def _shards(tensors: MappedTensors, module: str) -> Iterator[tuple[int, str]]:
    for name in tensors.names():
        number = _SHARD.search(name)
        if number is not None and name == f"{module}{number[0]}":
            yield int(number[1]), name


def _decode(tensors: MappedTensors, module: str, part: TensorPart, dtype: torch.dtype) -> Decode:
    if part.dtype != "F8_E4M3":
        return partial(_viewed, dtype=dtype)
    name = f"{module}.weight_scale"
    if name not in tensors:
        raise part.wrong(f"is stored as {part.dtype}, but {name} is missing")
    return partial(_scaled, scale=float(tensors.get(name, (1,))))


def _viewed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.view(dtype)


def _scaled(rows: Tensor, scale: float) -> Tensor:
    return rows.view(torch.float8_e4m3fn).float() * scale
