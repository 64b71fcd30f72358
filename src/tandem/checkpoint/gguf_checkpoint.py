"""`GGUFCheckpoint`: GGUF files as the named tensors that `models/` asks for, under Hugging Face's names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.gguf_config import supported, wholes_of
from tandem.checkpoint.gguf_file import GGUFTensor
from tandem.checkpoint.gguf_model import GGUFModel
from tandem.checkpoint.gguf_names import holds_experts, holds_table, layer_of
from tandem.checkpoint.gguf_rows import NUMBERS, WHOLE, GGUFRows, weights_of
from tandem.checkpoint.identity import identity
from tandem.checkpoint.mapped.cut import own_columns
from tandem.checkpoint.mapped.pages import Pages, Paging
from tandem.checkpoint.parts import is_table
from tandem.checkpoint.survey import stored_formats
from tandem.checkpoint.tables.readers import ignored, lookup_of
from tandem.checkpoint.tables.stored_rows import RowRange, StoredRows
from tandem.errors import CheckpointError
from tandem.formats.codes import Weight
from tandem.formats.cut import numbers
from tandem.formats.quant_format import QuantFormat
from tandem.spec.shard import ALL
from tandem.spec.stored import StoredFormat, StoredFormats


class GGUFCheckpoint:
    """Tensors by Hugging Face name. Blocks are read when asked for; plain numbers are views of the mapped file."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        supported(model)
        self._rows, self._wholes = GGUFRows(model), wholes_of(model)
        self._layers: dict[int | None, list[GGUFTensor]] = defaultdict(list)
        for tensor in model.tensors.values():
            self._layers[layer_of(tensor)].append(tensor)
        self._paging = Paging()

    @property
    def path(self) -> Path:
        return self.model.path

    def path_of(self, module: str) -> Path:
        return self.path

    def names(self) -> tuple[str, ...]:
        return tuple(self._rows.places)

    def __contains__(self, name: str) -> bool:
        return name in self._rows.places or name in self._wholes

    def has_matrix(self, module: str) -> bool:
        return f"{module}.weight" in self._rows.places

    def get(self, name: str, shape: tuple[int, ...] | None = None, *, whole: bool = False) -> Tensor:
        if name in self._wholes:
            return self._listed(name, shape)
        stored, kind = self._rows.shape(name), self._rows.place(name).tensor.kind
        if whole != (kind in WHOLE):
            where = self.model.where(self._rows.place(name).tensor)
            readable = " or ".join(WHOLE) if whole else f"{', '.join(NUMBERS)} or blocks"
            raise CheckpointError(f"{where} is stored as {kind}; it is read as {readable}")
        self._rows.check_shape(name, stored if shape is None else shape)
        tensor = self._rows.raw(name).contiguous().view(WHOLE[kind]).long() if whole else numbers(self._rows.read(name))
        return tensor.reshape(stored if shape is None else shape)

    def _listed(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        tensor = torch.tensor(self._wholes[name], dtype=torch.int64)
        if shape is not None and tensor.shape != shape:
            message = f"{self.path}: its metadata has {len(tensor)} numbers for {name}, but implies {math.prod(shape)}"
            raise CheckpointError(message)
        return tensor

    def lookup(self, name: str, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        self._rows.check_shape(name, shape)
        raw, kind = self._rows.raw(name), self._rows.place(name).tensor.kind
        return lambda ids: numbers(weights_of(raw.index_select(0, ids), kind))

    def table(
        self, module: str, shape: tuple[int, int], where: str = "map", progress: Callable[[int], None] = ignored
    ) -> Callable[[Tensor], Tensor]:
        name = f"{module}.weight"
        self._rows.check_shape(name, shape)
        tensor = self._rows.place(name).tensor
        piece = RowRange(self.model.file_of(tensor), tensor.start, shape[0])
        stored = StoredRows(module, (piece,), tensor.row_bytes, lambda raw: numbers(weights_of(raw, tensor.kind)))
        return lookup_of(stored, where, progress)

    def weight(self, module: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL) -> Weight:
        name = f"{module}.weight"
        if self._rows.shape(name) == shape:
            return self._rows.read(name, rows, columns)
        return own_columns(self.get(name, shape)[rows], columns)

    def expert_weight(
        self, module: str, expert: int, shape: tuple[int, int, int], rows: slice = ALL, columns: slice = ALL
    ) -> Weight:
        """GGUF's 3-D tensors stand for one name per expert, so `module` has an expert's number in it already."""
        return self.weight(module.format(expert=expert), shape[1:], rows, columns)

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        self._rows.check_shape(f"{module}.weight", shape[-2:])

    def format(self, module: str) -> QuantFormat:
        place = self._rows.place(f"{module}.weight")
        codes_kept = place.part is None or place.part.keeps_codes
        return QuantFormat(place.tensor.kind.lower() if codes_kept else "f32", "gguf")

    def formats(self) -> StoredFormats:
        names = (name for name in self._rows.places if name.endswith(".weight") and len(self._rows.shape(name)) == 2)
        modules = ((name.removesuffix(".weight"), math.prod(self._rows.shape(name))) for name in names)
        matrices = stored_formats((module, self.format(module), weights) for module, weights in modules)
        return replace(matrices, tables=self._tables())

    def _tables(self) -> StoredFormat:
        """Format of the tables that are read by row."""
        names = [name for name in self._rows.places if is_table(name) and name.endswith(".weight")]
        if not names:
            return StoredFormat()
        tensor = self._rows.place(names[0]).tensor
        return StoredFormat(name=tensor.kind.lower(), bytes_per_weight=tensor.nbytes / math.prod(tensor.shape))

    def expert_files(self) -> tuple[list[Path], bool]:
        return [file.path for file in self.model.files], True

    def nbytes(self, experts: bool | None = None) -> int:
        tensors = (t for t in self.model.tensors.values() if experts in (None, holds_experts(t)))
        tensors = (t for t in tensors if not holds_table(t))
        return sum(tensor.nbytes for tensor in tensors)

    def identity(self) -> str:
        return identity((file.path for file in self.model.files), ((t,) for t in self.model.tensors.values()))

    def read_ahead(self, layer: int, experts: bool | None = None) -> None:
        self._paging.read_ahead(self._pages(self._layers.get(layer, ()), experts), self)

    def forget(self, layer: int, experts: bool | None = None) -> None:
        self._paging.forget(self._pages(self._layers.get(layer, ()), experts), self)

    def release(self, experts: bool | None = None) -> None:
        self._paging.forget(self._pages(self.model.tensors.values(), experts), self)
        self._paging.wait()

    def _pages(self, tensors: Iterable[GGUFTensor], experts: bool | None) -> Iterator[Pages]:
        return (self.model.pages(tensor) for tensor in tensors if experts in (None, holds_experts(tensor)))
