"""`GGUFCheckpoint`: GGUF files as the named tensors that `models/` asks for, under Hugging Face's names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tandem.architectures import GGUF
from tandem.architectures.family import Part
from tandem.checkpoint.gguf_config import parts_of
from tandem.checkpoint.gguf_file import GGUFTensor
from tandem.checkpoint.gguf_model import GGUFModel
from tandem.checkpoint.gguf_names import Place, holds_experts, layer_of, places, with_parts
from tandem.checkpoint.identity import identity
from tandem.checkpoint.pages import Pages, Paging
from tandem.checkpoint.survey import stored_formats
from tandem.config import StoredFormats
from tandem.errors import CheckpointError
from tandem.formats.codes import Weight
from tandem.formats.cut import numbers, rows_of
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.quant_format import QuantFormat

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WHOLE = {"I32": torch.int32}
WHOLE_NAMES = (".tid2eid",)  # ends of names whose whole numbers are read; nothing computes with others


class GGUFCheckpoint:
    """Tensors by Hugging Face name. Blocks are read when asked for; plain numbers are views of the mapped file."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        if model.architecture not in GGUF:
            known = ", ".join(sorted(GGUF))
            raise CheckpointError(
                f"{model.path}: {model.architecture!r} is not supported; these are: {known}"
            )
        self._places: dict[str, Place] = {}
        self._layers: dict[int | None, list[GGUFTensor]] = defaultdict(list)
        for tensor in model.tensors.values():
            self._places.update(places(model.architecture, tensor))
            self._layers[layer_of(tensor)].append(tensor)
        self._places = with_parts(self._places, parts_of(model))
        self._heads = _turned_heads(model)
        self._paging = Paging()
        self._check_kinds()

    @property
    def path(self) -> Path:
        return self.model.path

    def path_of(self, module: str) -> Path:
        return self.path

    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def has_matrix(self, module: str) -> bool:
        return f"{module}.weight" in self._places

    def get(self, name: str, shape: tuple[int, ...] | None = None, *, whole: bool = False) -> Tensor:
        stored, kind = self._shape(name), self._place(name).tensor.kind
        if whole != (kind in WHOLE):
            where = self.model.where(self._place(name).tensor)
            readable = " or ".join(WHOLE) if whole else f"{', '.join(NUMBERS)} or blocks"
            raise CheckpointError(f"{where} is stored as {kind}; it is read as {readable}")
        self._check_shape(name, stored if shape is None else shape)
        read = self._raw(name).contiguous().view(WHOLE[kind]).long() if whole else numbers(self._read(name))
        return read.reshape(stored if shape is None else shape)

    def lookup(self, name: str, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        self._check_shape(name, shape)
        raw, kind = self._raw(name), self._place(name).tensor.kind
        return lambda ids: numbers(_weights(raw.index_select(0, ids), kind))

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        name = f"{module}.weight"
        return self._read(name) if self._shape(name) == shape else self.get(name, shape)

    def expert_weight(
        self, module: str, expert: int, shape: tuple[int, int, int], rows: slice = slice(None)
    ) -> Weight:
        """GGUF's 3-D tensors stand for one name per expert, so `module` has an expert's number in it already."""
        return rows_of(self.weight(module.format(expert=expert), shape[1:]), rows)

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        self._check_shape(f"{module}.weight", shape[-2:])

    def format(self, module: str) -> QuantFormat:
        place = self._place(f"{module}.weight")
        read = place.part is None or place.part.keeps_codes
        return QuantFormat(place.tensor.kind.lower() if read else "f32", "gguf")

    def formats(self) -> StoredFormats:
        names = (name for name in self._places if name.endswith(".weight") and len(self._shape(name)) == 2)
        modules = ((name.removesuffix(".weight"), math.prod(self._shape(name))) for name in names)
        return stored_formats((module, self.format(module), weights) for module, weights in modules)

    def expert_files(self) -> tuple[list[Path], bool]:
        return [file.path for file in self.model.files], True

    def nbytes(self, experts: bool | None = None) -> int:
        wanted = (t for t in self.model.tensors.values() if experts in (None, holds_experts(t)))
        return sum(tensor.nbytes for tensor in wanted)

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

    def _place(self, name: str) -> Place:
        try:
            return self._places[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor that stands for {name}") from None

    def _shape(self, name: str) -> tuple[int, ...]:
        """Heads' matrices in one tensor count as one matrix."""
        place = self._place(name)
        if place.expert is not None:
            return place.tensor.shape[1:]
        *outer, columns = place.tensor.shape
        if place.part is not None and place.part.rows:
            return (len(place.part.rows), *place.tensor.shape[1:])
        return (math.prod(outer), columns) if len(outer) > 1 else place.tensor.shape

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if _squeezed(stored := self._shape(name)) != _squeezed(shape):
            where = self.model.where(self._place(name).tensor)
            raise CheckpointError(f"{where} has shape {stored}, but the metadata implies {shape}")

    def _read(self, name: str) -> Weight:
        """Numbers or codes [rows, K]."""
        place = self._place(name)
        read = _weights(self._raw(name), place.tensor.kind)
        return read if place.part is None or place.part.keeps_codes else _made(numbers(read), place.part)

    def _raw(self, name: str) -> Tensor:
        """The stored bytes, uint8 [rows, bytes of a row]; those of q and k in the order that Hugging Face has."""
        place = self._place(name)
        rows = self.model.rows(place.tensor)
        if place.expert is not None:
            count = math.prod(place.tensor.shape[1:-1])
            rows = rows[place.expert * count : (place.expert + 1) * count]
        if place.part is not None and place.part.rows:
            rows = rows.view(place.tensor.shape[0], -1)[torch.tensor(place.part.rows)]
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2])
        return rows if heads is None else _split_halves(rows, heads, place.tensor)

    def _check_kinds(self) -> None:
        for name, place in self._places.items():
            readable = (*WHOLE,) if name.endswith(WHOLE_NAMES) else (*NUMBERS, *GGUF_CODES)
            if place.tensor.kind not in readable:
                example = "" if name.endswith(WHOLE_NAMES) else ", for example Q4_K_M"
                raise CheckpointError(
                    f"{self.model.where(place.tensor)} is stored as {place.tensor.kind}; readable are "
                    f"{', '.join(readable)}: take a file in one of these{example}"
                )


def _weights(raw: Tensor, kind: str) -> Weight:
    """Rows of stored bytes, uint8 [N, bytes], as numbers or codes [N, K]."""
    if kind in GGUF_CODES:
        return GGUF_CODES[kind](raw)
    return raw.contiguous().view(NUMBERS[kind])


def _made(x: Tensor, part: Part) -> Tensor:
    """Numbers in another form: float32, since 1 + w loses bits of a w in bfloat16."""
    x = x.float()
    if part.columns:
        x = x[:, torch.tensor(part.columns)]
    if part.numbers == "x - 1":
        return x - 1
    return x if part.numbers == "x" else (-x).log()


def _turned_heads(model: GGUFModel) -> dict[str, int]:
    """Heads of the projections whose rows llama.cpp's converter reorders: those of `llama`, and of no other."""
    if model.architecture != "llama":
        return {}
    heads = model.need("llama.attention.head_count", int)
    return {"q_proj": heads, "k_proj": model.optional("llama.attention.head_count_kv", heads)}


def _split_halves(rows: Tensor, heads: int, tensor: GGUFTensor) -> Tensor:
    """Undoes the interleaving of the rotary halves: rows (0, 1, 2, 3 …) of a head were (0, D/2, 1, D/2 + 1 …)."""
    if len(tensor.shape) == 1:  # a bias is one row of numbers
        rows = rows.view(tensor.shape[0], -1)
    if len(rows) % (2 * heads):
        raise CheckpointError(f"tensor {tensor.name} has {len(rows)} rows, which {heads} heads do not divide")
    pairs = rows.view(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[1, K] is stored as [K], [C, 1, K] as [C, K]."""
    return tuple(size for size in shape if size != 1)
