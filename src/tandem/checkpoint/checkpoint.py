"""`Checkpoint`: a directory of safetensors files as named tensors, mapped, not read.

Knows no model: which names exist and what they mean is `models/`' business.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.config.json_keys import read_json
from tandem.errors import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A model directory: one or several `*.safetensors`, with or without an index.

    Opening reads only headers. Raises CheckpointError naming the file (and tensor): no such directory, no weights, a
    missing or truncated shard, a tensor in two shards, an index that does not match.
    """
    return Checkpoint(Path(path))


class Checkpoint:
    """Tensors by name. Views stay valid as long as they are referenced, whatever `release` does."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory: give a model directory, or 'demo'")
        self.path = path
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for file in self._shards():
            self._add(file)
        self._check_index()
        self.release()

    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def dtype(self, name: str) -> torch.dtype:
        """Without loading. CheckpointError for a dtype we cannot compute with."""
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{self._where(name)} is stored as {stored}; readable are {known}")
        return DTYPES[stored]

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A view of the mapped file, in the stored dtype. CheckpointError when absent or not of `shape`."""
        self.dtype(name)
        tensor: Tensor = self._open(self._file(name)).get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._where(name)} has shape {tuple(tensor.shape)}, but config.json implies {shape}"
            )
        return tensor

    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in set(self._file_of.values()))

    def release(self) -> None:
        """Unmaps what no view refers to, so that pages already read stop counting as this process's memory."""
        self._files.clear()

    # -- reading ---

    def _shards(self) -> Iterator[Path]:
        if (self.path / INDEX).exists():
            shards = sorted(set(self._index_map.values()))
            for shard in shards:
                if not (self.path / shard).is_file():
                    raise CheckpointError(f"{self.path / shard} is missing; {INDEX} lists it: copy it again")
            return iter([self.path / shard for shard in shards])
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self.path} holds no *.safetensors files: is it a model directory?")
        return iter(files)

    @cached_property
    def _index_map(self) -> dict[str, str]:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{self.path / INDEX} has no 'weight_map' of tensor names to files")
        return weight_map

    def _add(self, file: Path) -> None:
        for name in self._open(file).keys():  # noqa: SIM118 (not a dict)
            if name in self._file_of:
                raise CheckpointError(f"tensor {name} is in both {self._file_of[name].name} and {file.name}")
            self._file_of[name] = file

    def _check_index(self) -> None:
        if not (self.path / INDEX).exists():
            return
        for name, shard in self._index_map.items():
            if self._file_of.get(name) != self.path / shard:
                raise CheckpointError(f"{self.path / shard} lacks tensor {name}, which {INDEX} says it has")

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file} is truncated or not safetensors ({error}): copy it again"
                ) from error
        return self._files[file]

    def _slice(self, name: str) -> Any:
        return self._open(self._file(name)).get_slice(name)

    def _file(self, name: str) -> Path:
        try:
            return self._file_of[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def _where(self, name: str) -> str:
        return f"{self._file(name)}: tensor {name}"
