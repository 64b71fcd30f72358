"""`Checkpoint`: a directory of safetensors files as named tensors, mapped, not read.

Knows no model: which names exist and what they mean is `models/`' business. Only one thing is read out of a name: the
number of its layer, so that a whole layer's bytes can be asked for before they are needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.pages import Pages, Paging
from tandem.checkpoint.shard import Shard
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
    """Tensors by name: views of the mapped files, which stay valid as long as they are referenced."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory: give a model directory, or 'demo'")
        self.path = path
        self._shard_of: dict[str, Shard] = {}
        for file in self._files():
            self._add(Shard(file))
        self._check_index()
        self._paging = Paging()

    def names(self) -> tuple[str, ...]:
        return tuple(self._shard_of)

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def dtype(self, name: str) -> torch.dtype:
        """Without loading. CheckpointError for a dtype we cannot compute with."""
        stored = self._shard(name).entries[name].dtype
        if stored not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{self._where(name)} is stored as {stored}; readable are {known}")
        return DTYPES[stored]

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A view of the mapped file, in the stored dtype. CheckpointError when absent or not of `shape`."""
        self.dtype(name)
        tensor = self._shard(name).get(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._where(name)} has shape {tuple(tensor.shape)}, but config.json implies {shape}"
            )
        return tensor

    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.nbytes for shard in set(self._shard_of.values()))

    def read_ahead(self, layer: int) -> None:
        """Asks for the bytes of every tensor of this layer (the first number in its name). Returns at once."""
        self._paging.read_ahead(self._pages(layer), self)

    def forget(self, layer: int) -> None:
        """Lets go of the layer's pages, so that they stop counting as this process's memory. Views stay valid."""
        self._paging.forget(self._pages(layer), self)

    def release(self) -> None:
        """`forget` for all that was read; waits until it is done."""
        pages = (shard.pages(name) for name, shard in self._shard_of.items())
        self._paging.forget(pages, self)
        self._paging.wait()

    # -- reading ---

    def _files(self) -> Iterator[Path]:
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

    def _add(self, shard: Shard) -> None:
        for name in shard.entries:
            if name in self._shard_of:
                other = self._shard_of[name].path.name
                raise CheckpointError(f"tensor {name} is in both {other} and {shard.path.name}")
            self._shard_of[name] = shard

    def _check_index(self) -> None:
        if not (self.path / INDEX).exists():
            return
        for name, file in self._index_map.items():
            if name not in self._shard_of or self._shard_of[name].path != self.path / file:
                raise CheckpointError(f"{self.path / file} lacks tensor {name}, which {INDEX} says it has")

    @cached_property
    def _layers(self) -> dict[int, list[str]]:
        """Names by the first number in them."""
        layers: dict[int, list[str]] = defaultdict(list)
        for name in self._shard_of:
            number = next((part for part in name.split(".") if part.isdecimal()), None)
            if number is not None:
                layers[int(number)].append(name)
        return layers

    def _pages(self, layer: int) -> list[Pages]:
        return [self._shard_of[name].pages(name) for name in self._layers.get(layer, ())]

    def _shard(self, name: str) -> Shard:
        try:
            return self._shard_of[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def _where(self, name: str) -> str:
        return f"{self._shard(name).path}: tensor {name}"
