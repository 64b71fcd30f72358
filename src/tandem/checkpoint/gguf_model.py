"""`GGUFModel`: the one or several GGUF files of a model, as one set of metadata and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from tandem.checkpoint.gguf_file import GGUFFile, GGUFTensor
from tandem.checkpoint.mapped.pages import Pages
from tandem.errors import CheckpointError
from tandem.spec.small_files import unreadable

SUFFIX = ".gguf"
T = TypeVar("T", int, float, bool, str)


class GGUFModel:
    """Metadata is the first file's; tensors are those of all files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [GGUFFile(file) for file in split_files(path)]
        self.metadata: dict[str, Any] = self.files[0].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        self._file_of: dict[str, GGUFFile] = {}
        for file in self.files:
            self._add(file)
        if not self.tensors:
            raise CheckpointError(f"{path} holds no tensors: is it only a vocabulary?")
        if (count := self.optional("split.count", 1)) > len(self.files):
            raise CheckpointError(
                f"{path} is one of {count} files: give them back their names, NAME-00001-of-{count:05}.gguf …"
            )

    @property
    def architecture(self) -> str:
        return self.need("general.architecture", str)

    def need(self, key: str, kind: type[T]) -> T:
        """A metadata value; CheckpointError when it is absent or not a `kind`."""
        if key not in self.metadata:
            raise CheckpointError(f"{self.path} lacks {key}: convert the model again with today's llama.cpp")
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{self.path}: {key} is {str(value)[:40]!r}, not a {kind.__name__}")
        return value

    def optional(self, key: str, default: T) -> T:
        return self.need(key, type(default)) if key in self.metadata else default

    def array(self, key: str, kind: type[T]) -> list[T]:
        """A metadata array of `kind`; [] when absent."""
        values = self.metadata.get(key, [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise CheckpointError(f"{self.path}: {key} is not an array of {kind.__name__}")
        return values

    def rows(self, tensor: GGUFTensor) -> Tensor:
        """The stored bytes, uint8 [rows of all outer dimensions, bytes of a row]: a view of the mapped file."""
        data = self._file_of[tensor.name].data(tensor)
        return data.view(math.prod(tensor.shape[:-1]), tensor.row_bytes)

    def where(self, tensor: GGUFTensor) -> str:
        return f"{self.file_of(tensor)}: tensor {tensor.name}"

    def file_of(self, tensor: GGUFTensor) -> Path:
        return self._file_of[tensor.name].path

    def pages(self, tensor: GGUFTensor) -> Pages:
        return self._file_of[tensor.name].pages(tensor)

    def _add(self, file: GGUFFile) -> None:
        for name, tensor in file.tensors.items():
            if name in self.tensors:
                raise CheckpointError(f"tensor {name} is in both {self._file_of[name].path} and {file.path}")
            self.tensors[name], self._file_of[name] = tensor, file


def open_gguf(path: Path) -> GGUFModel:
    """The model that `path` is (a part of). Opened files are remembered as long as they do not change on disk."""
    try:
        stamps = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in split_files(path))
    except OSError as error:
        raise unreadable(path, error) from error
    return _opened(path, stamps)


@lru_cache(1)
def _opened(path: Path, _stamps: tuple[tuple[int, int], ...]) -> GGUFModel:
    return GGUFModel(path)


def split_files(path: Path) -> Iterator[Path]:
    """All files of a model of which `path` is one: itself, or `NAME-00001-of-00003.gguf` and its neighbours."""
    stem, _, count = path.name.removesuffix(SUFFIX).rpartition("-of-")
    name, _, number = stem.rpartition("-")
    if not (name and len(number) == len(count) == 5 and number.isdecimal() and count.isdecimal()):
        yield path
        return
    for index in range(1, int(count) + 1):
        file = path.with_name(f"{name}-{index:05}-of-{count}{SUFFIX}")
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing; {path.name} is one of {int(count)} files: copy it again"
            )
        yield file


def is_gguf(path: Path) -> bool:
    """Whether `path` is to be read as GGUF: by its name, or by its first bytes. Raises CheckpointError."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError as error:
        raise unreadable(path, error) from error
