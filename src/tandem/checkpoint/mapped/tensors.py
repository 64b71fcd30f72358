"""`MappedTensors`: the tensors of a directory of safetensors files by Hugging Face's names, mapped, not read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torch import Tensor

from tandem.checkpoint.key_names import hugging_face_names
from tandem.checkpoint.mapped.shard_pages import ShardPages
from tandem.checkpoint.mapped.shards import Shards
from tandem.checkpoint.parts import TensorPart, squeezed
from tandem.errors import CheckpointError

INTEGERS = ("I32", "I64")
NUMBERS = ("BF16", "F16", "F32")


class MappedTensors:
    """Views of the mapped files, which stay valid as long as they are referenced."""

    def __init__(self, path: Path) -> None:
        self._shards = Shards(path)
        self._pages = ShardPages(self._shards)
        stored = hugging_face_names(self._shards.names())
        self._parts = {name: self._header(own) for name, own in stored.items()}

    @property
    def path(self) -> Path:
        return self._shards.path

    def path_of(self, module: str) -> Path:
        """Which directory has it, or should have it."""
        return self.path

    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def get(self, name: str, shape: tuple[int, ...] | None = None, *, whole: bool = False) -> Tensor:
        """A view of the mapped file, in the stored dtype; sizes of 1 may be more or fewer. CheckpointError when absent,
        not of `shape`, or of a type that we cannot compute with."""
        part = self.part(name)
        readable = INTEGERS if whole else NUMBERS
        if part.dtype not in readable:
            whose = "its whole numbers are read" if whole else "it is read"
            raise part.wrong(f"is stored as {part.dtype}; {whose} as {' or '.join(readable)}")
        if shape is None:
            return self.mapped(part)
        if squeezed(part.shape) != squeezed(shape):
            raise part.wrong(f"has shape {part.shape}, but config.json implies {shape}")
        return self.mapped(part).view(shape)

    def lookup(self, name: str, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        """Rows of a matrix by their numbers; it stays mapped as long as the function is referenced."""
        return partial(self.get(name, shape).index_select, 0)

    def part(self, name: str) -> TensorPart:
        """A tensor's header."""
        try:
            return self._parts[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def mapped(self, part: TensorPart) -> Tensor:
        return self._shards.get(part.name).view(self._shape(part.name))

    def byte_range(self, name: str) -> tuple[int, int]:
        """Where the tensor's bytes begin and end in the file of `part(name)`."""
        entry = self._shards.entry(self.part(name).name)
        return entry.begin, entry.end

    def expert_files(self) -> tuple[list[Path], bool]:
        return self._shards.expert_files()

    def nbytes(self, experts: bool | None = None) -> int:
        """Bytes of all tensors, of routed experts only (True), or of everything else (False)."""
        return self._shards.nbytes(experts)

    def identity(self) -> str:
        """Changes whenever a file does: see `identity.py`."""
        return self._shards.identity()

    def read_ahead(self, layer: int, experts: bool | None = None) -> None:
        """Asks for the bytes of every tensor of this layer (the first number in its name). Returns at once."""
        self._pages.read_ahead(layer, experts)

    def forget(self, layer: int, experts: bool | None = None) -> None:
        """Lets go of the layer's pages, so that they stop counting as this process's memory. Views stay valid."""
        self._pages.forget(layer, experts)

    def read_ahead_tensors(self, names: Iterable[str]) -> None:
        """As `read_ahead`, for these."""
        self._pages.read_ahead_tensors([self.part(name).name for name in names])

    def forget_tensors(self, names: Iterable[str]) -> None:
        """As `forget`, for these."""
        self._pages.forget_tensors([self.part(name).name for name in names])

    def release(self, experts: bool | None = None) -> None:
        """`forget` for all that was read; waits until it is done."""
        self._pages.release(experts)

    def _header(self, stored: str) -> TensorPart:
        entry = self._shards.entry(stored)
        return TensorPart(stored, self._shards.file(stored), entry.dtype, self._shape(stored))

    def _shape(self, stored: str) -> tuple[int, ...]:
        """ModelOpt's scales of blocks are [rows, 1, columns, 1], of several experts [experts, rows, 1, columns, 1]."""
        shape = self._shards.entry(stored).shape
        if len(shape) < 4 or not stored.endswith("scale") or (shape[-3], shape[-1]) != (1, 1):
            return shape
        return (*shape[:-3], shape[-2])
