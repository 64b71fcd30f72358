"""`Shards`: the safetensors files of a directory, by the names that their tensors have in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from torch import Tensor

from tandem.checkpoint.identity import identity
from tandem.checkpoint.mapped.pages import Pages
from tandem.checkpoint.mapped.shard import MappedShard, TensorHeader
from tandem.checkpoint.parts import is_expert, is_table
from tandem.errors import CheckpointError
from tandem.spec.json_keys import read_json
from tandem.spec.small_files import INDEX_BYTES

INDEX = "model.safetensors.index.json"
BF16_BYTES = 2
_UNFINISHED = (".incomplete", ".part", ".aria2", ".crdownload")  # of programs that fetch files
_PICKLES = (".bin", ".pth", ".pt")


class Shards:
    """One or several `*.safetensors`, with or without an index. Opening reads headers only."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory: give a model directory, or 'demo'")
        self.path = path
        self._of: dict[str, MappedShard] = {}
        self._add_all([MappedShard(file) for file in self._files()])
        self._check_index()

    def names(self) -> Iterable[str]:
        return self._of

    def entry(self, name: str) -> TensorHeader:
        return self._of[name].entries[name]

    def file(self, name: str) -> Path:
        """Which one holds the tensor."""
        return self._of[name].path

    def get(self, name: str) -> Tensor:
        """A view of the mapped file."""
        return self._of[name].get(name)

    def each(self) -> list[MappedShard]:
        return list(dict.fromkeys(self._of.values()))

    def pages(self, names: Iterable[str]) -> list[Pages]:
        """Where these tensors lie in memory."""
        by_shard: dict[MappedShard, list[str]] = defaultdict(list)
        for name in names:
            by_shard[self._of[name]].append(name)
        return [pages for shard, own in by_shard.items() for pages in shard.pages(own)]

    def expert_files(self) -> tuple[list[Path], bool]:
        """As `Checkpoint.expert_files`."""
        entries = [(shard, shard.entries[name]) for name, shard in self._of.items() if is_expert(name)]
        aligned = all(entry.begin % BF16_BYTES == 0 for _, entry in entries)
        return list(dict.fromkeys(shard.path for shard, _ in entries)), aligned

    def nbytes(self, experts: bool | None = None) -> int:
        """Bytes of all tensors but tables, of routed experts only (True), or of everything else (False)."""
        entries = (self.entry(name) for name in self._of if experts in (None, is_expert(name)) and not is_table(name))
        return sum(entry.end - entry.begin for entry in entries)

    def identity(self) -> str:
        """Changes whenever a file does: see `identity.py`."""
        shards = self.each()
        return identity([s.path for s in shards], ((s.path.name, s.header_digest) for s in shards))

    def _files(self) -> Iterator[Path]:
        if self._index_map:
            shards = sorted(set(self._index_map.values()))
            for shard in shards:
                if not (self.path / shard).is_file():
                    raise CheckpointError(f"{self.path / shard} is missing; {INDEX} lists it: copy it again")
            return iter([self.path / shard for shard in shards])
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self.path} holds no *.safetensors files: {_instead(self.path)}")
        return iter(files)

    @cached_property
    def _index_map(self) -> dict[str, str]:
        """Tensor → file; {} without an index."""
        if not (self.path / INDEX).exists():
            return {}
        weight_map = read_json(self.path / INDEX, INDEX_BYTES).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(v, str) for v in weight_map.values())
        ):
            raise CheckpointError(f"{self.path / INDEX} has no 'weight_map' of tensor names to files")
        return weight_map

    def _add_all(self, shards: list[MappedShard]) -> None:
        """Where several shards hold a tensor, the index says which counts. Raises CheckpointError if it does not."""
        weight_map = self._index_map
        for shard in shards:
            for name in shard.entries:
                other = self._of.get(name)
                if other is None or self.path / weight_map.get(name, "") == shard.path:
                    self._of[name] = shard
                elif self.path / weight_map.get(name, "") != other.path:
                    raise CheckpointError(f"tensor {name} is in both {other.path.name} and {shard.path.name}")

    def _check_index(self) -> None:
        for name, file in self._index_map.items():
            if name not in self._of:
                raise CheckpointError(f"{self.path / file} lacks tensor {name}, which {INDEX} says it has")


def _instead(directory: Path) -> str:
    """Advice about a directory without weights: what it has, and what to do about it."""
    if unfinished := [path.name for path in directory.iterdir() if path.suffix in _UNFINISHED]:
        return f"the download of {unfinished[0]} is not finished; fetch the rest"
    if pickles := [path.name for path in directory.iterdir() if path.suffix in _PICKLES]:
        return f"{pickles[0]} is not read, since it may hold a program; fetch the model's *.safetensors files"
    return "is it a model directory?"
