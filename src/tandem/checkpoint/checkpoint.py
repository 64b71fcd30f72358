"""`Checkpoint`: a directory of safetensors files as named tensors and matrices, mapped, not read.

Knows no model: `models/` says which names exist and what they mean. Names are Hugging Face's, however they are spelt in
the files (`key_names.py`). A name says two things: which matrix the tensor is part of (`parts.py`), and its layer, for
reading a layer's pages ahead.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from tandem.checkpoint.identity import identity
from tandem.checkpoint.key_names import DRAFT, hugging_face_names
from tandem.checkpoint.layouts import detect
from tandem.checkpoint.pages import Pages, Paging, joined
from tandem.checkpoint.parts import Part, Parts, by_module, codes_part, is_expert, one_expert
from tandem.checkpoint.quant_hints import quant_hints
from tandem.checkpoint.shard import Shard
from tandem.checkpoint.stored_matrix import Stored
from tandem.checkpoint.survey import stored_formats, survey
from tandem.config import StoredFormats
from tandem.config.json_keys import read_json
from tandem.config.small_files import INDEX_BYTES
from tandem.errors import CheckpointError
from tandem.formats.codes import Weight
from tandem.formats.cut import rows_of
from tandem.formats.quant_format import QuantFormat

INDEX = "model.safetensors.index.json"
BF16_BYTES = 2
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
INTEGERS = ("I32", "I64")
NUMBERS = ("BF16", "F16", "F32")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A model directory: one or several `*.safetensors`, with or without an index.

    Opening reads only headers. Raises CheckpointError, which names the file (and tensor). Reasons: a missing directory,
    no weights, a missing or truncated shard, a tensor in two shards, an index that does not match, scales that are
    missing or do not fit.
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
        self._joined: dict[bool | None, dict[int, list[Pages]]] = {}
        self._parts = {
            name: self._header(stored) for name, stored in hugging_face_names(self._shard_of).items()
        }
        self._modules = by_module(self._parts.items())
        self._hints = quant_hints(path)
        self._survey = survey(self._modules, self._hints)

    def path_of(self, module: str) -> Path:
        """Which directory has it, or should have it."""
        return self.path

    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def has_matrix(self, module: str) -> bool:
        """Whether `weight(module)` (or `expert_weight`) would find something, however it is stored."""
        return codes_part(self._modules.get(module, {})) is not None

    def get(self, name: str, shape: tuple[int, ...] | None = None, *, whole: bool = False) -> Tensor:
        """A view of the mapped file, in the stored dtype; [1, n] is a vector, too. CheckpointError when absent, not
        of `shape`, or of a type that we cannot compute with."""
        part = self._part(name)
        readable = INTEGERS if whole else NUMBERS
        if part.dtype not in readable:
            whose = "its whole numbers are read" if whole else "it is read"
            raise part.wrong(f"is stored as {part.dtype}; {whose} as {' or '.join(readable)}")
        if shape is not None and part.shape == (1, *shape):
            return self._mapped(part)[0]
        if shape is not None and part.shape != shape:
            raise part.wrong(f"has shape {part.shape}, but config.json implies {shape}")
        return self._mapped(part)

    def lookup(self, name: str, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        """Rows of a matrix by their numbers; it stays mapped as long as the function is referenced."""
        return partial(self.get(name, shape).index_select, 0)

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        """The matrix [N, K] of `module` (a name without `.weight`), however it is stored.

        Numbers are a view of the mapped file, codes are made from mapped parts by this call. CheckpointError when it is
        absent, of another shape, or stored in a way that cannot be read.
        """
        parts = self._matrix_parts(module)
        return detect(parts, self._hints, shape).read(lambda role: self._mapped(parts[role]))

    def expert_weight(
        self, module: str, expert: int, shape: tuple[int, int, int], rows: slice = slice(None)
    ) -> Weight:
        """One expert of a fused 3-D tensor of `shape` [E, N, K], of its matrix `rows`; otherwise as `weight`."""
        count, n, k = shape
        parts = self._matrix_parts(module)
        found = detect(one_expert(parts, count), self._hints, (n, k))
        return rows_of(found.read(lambda role: self._mapped(parts[role])[expert]), rows)

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        """Reads no weights."""
        parts = self._matrix_parts(module)
        *experts, n, k = shape
        detect(one_expert(parts, experts[0]) if experts else parts, self._hints, (n, k))

    def format(self, module: str) -> QuantFormat:
        """How `module` is stored, from headers alone."""
        return self._surveyed(module).format

    def formats(self) -> StoredFormats:
        """What experts and dense matrices are stored as, for the planner."""
        return stored_formats((module, stored.format, n) for module, (stored, n) in self._survey.items())

    def part(self, name: str) -> Part:
        """A tensor's header."""
        return self._part(name)

    def modules(self) -> Mapping[str, Parts]:
        """Every module (a name without `.weight`): the headers of its tensors by their role."""
        return self._modules

    def shape(self, module: str) -> tuple[int, int]:
        """[N, K] of the matrix of `module`, as its tensors say."""
        parts = self._matrix_parts(module)
        if "shape" in parts:  # packed words alone do not say how many bits a code has
            n, k = self._mapped(parts["shape"]).tolist()
            return n, k
        return self._surveyed(module).shape

    def expert_files(self) -> tuple[list[Path], bool]:
        found = [(shard, shard.entries[name]) for name, shard in self._shard_of.items() if is_expert(name)]
        aligned = all(entry.begin % BF16_BYTES == 0 for _, entry in found)
        return list(dict.fromkeys(shard.path for shard, _ in found)), aligned

    def byte_range(self, name: str) -> tuple[int, int]:
        """Where the tensor's bytes begin and end in the file of `part(name)`."""
        stored = self._part(name).name
        entry = self._shard_of[stored].entries[stored]
        return entry.begin, entry.end

    def nbytes(self, experts: bool | None = None) -> int:
        """Bytes of all tensors, of routed experts only (True), or of everything else (False)."""
        wanted = (name for name in self._shard_of if experts in (None, is_expert(name)))
        entries = (self._shard_of[name].entries[name] for name in wanted)
        return sum(entry.end - entry.begin for entry in entries)

    def identity(self) -> str:
        """Changes whenever a file does: see `identity.py`."""
        shards = self._shards()
        return identity([s.path for s in shards], ((s.path.name, s.header_digest) for s in shards))

    def read_ahead(self, layer: int, experts: bool | None = None) -> None:
        """Asks for the bytes of every tensor of this layer (the first number in its name). Returns at once."""
        self._paging.read_ahead(self._pages(layer, experts), self)

    def forget(self, layer: int, experts: bool | None = None) -> None:
        """Lets go of the layer's pages, so that they stop counting as this process's memory. Views stay valid."""
        self._paging.forget(self._pages(layer, experts), self)

    def read_ahead_tensors(self, names: Iterable[str]) -> None:
        """As `read_ahead`, for these."""
        self._paging.read_ahead(self._pages_of(names), self)

    def forget_tensors(self, names: Iterable[str]) -> None:
        """As `forget`, for these."""
        self._paging.forget(self._pages_of(names), self)

    def release(self, experts: bool | None = None) -> None:
        """`forget` for all that was read; waits until it is done."""
        if experts is None:
            self._paging.forget([shard.all_pages for shard in self._shards()], self)
        else:
            wanted = [name for name in self._shard_of if is_expert(name) == experts]
            self._paging.forget(self._pages_of_stored(wanted), self)
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
        weight_map = read_json(self.path / INDEX, INDEX_BYTES).get("weight_map")
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
            number = _NUMBER.search(name)
            if number is not None and not name.startswith(DRAFT):
                layers[int(number[1])].append(name)
        return layers

    def _pages_of(self, names: Iterable[str]) -> list[Pages]:
        return self._pages_of_stored(self._part(name).name for name in names)

    def _pages(self, layer: int, experts: bool | None = None) -> Iterator[Pages]:
        """A generator, so that `Paging` does the work for all layers at once, while the first weights are packed. Later
        the thread that gives workers the next layer would wait for the interpreter meanwhile."""
        if experts not in self._joined:
            wanted = {
                layer: [name for name in names if experts is None or experts == is_expert(name)]
                for layer, names in self._layers.items()
            }
            self._joined[experts] = {
                layer: joined(self._pages_of_stored(names)) for layer, names in wanted.items()
            }
        yield from self._joined[experts].get(layer, ())

    def _pages_of_stored(self, names: Iterable[str]) -> list[Pages]:
        by_shard: dict[Shard, list[str]] = defaultdict(list)
        for name in names:
            by_shard[self._shard_of[name]].append(name)
        return [pages for shard, own in by_shard.items() for pages in shard.pages(own)]

    def _shards(self) -> list[Shard]:
        return list(dict.fromkeys(self._shard_of.values()))

    # -- matrices ---

    def _surveyed(self, module: str) -> Stored:
        if module not in self._survey:
            raise CheckpointError(f"{self.path} has no matrix {module}.weight")
        return self._survey[module][0]

    def _matrix_parts(self, module: str) -> dict[str, Part]:
        if not self.has_matrix(module):
            raise CheckpointError(f"{self.path} has no tensor {module}.weight")
        return self._modules[module]

    def _header(self, stored: str) -> Part:
        shard = self._shard_of[stored]
        entry = shard.entries[stored]
        return Part(stored, shard.path, entry.dtype, entry.shape)

    def _mapped(self, part: Part) -> Tensor:
        return self._shard_of[part.name].get(part.name)

    def _part(self, name: str) -> Part:
        try:
            return self._parts[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None
