"""`GGUFRows`: where a Hugging Face name lies in GGUF files, of what shape, and how its rows are read."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tandem.architectures import GGUF
from tandem.architectures.family import DerivedTensor
from tandem.checkpoint.gguf_config import parts_of
from tandem.checkpoint.gguf_file import GGUFTensor
from tandem.checkpoint.gguf_model import GGUFModel
from tandem.checkpoint.gguf_names import TensorPlace, places, with_parts
from tandem.checkpoint.mapped.cut import own_columns
from tandem.checkpoint.parts import squeezed
from tandem.errors import CheckpointError
from tandem.formats.codes import Weight
from tandem.formats.cut import numbers
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.quant_format import QuantFormat
from tandem.spec.shard import ALL

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WHOLE = {"I32": torch.int32}
WHOLE_NAMES = (".tid2eid",)  # ends of names whose whole numbers are read; nothing computes with others


class GGUFRows:
    """Raises CheckpointError for names that no tensor stands for, and for kinds that nobody reads."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        by_name: dict[str, TensorPlace] = {}
        for tensor in model.tensors.values():
            by_name.update(places(model.architecture, tensor))
        self.places = with_parts(by_name, parts_of(model))
        self._heads = _turned_heads(model)
        self._check_kinds()

    def place(self, name: str) -> TensorPlace:
        try:
            return self.places[name]
        except KeyError:
            raise CheckpointError(f"{self.model.path} has no tensor that stands for {name}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Heads' matrices in one tensor count as one matrix."""
        place = self.place(name)
        if place.expert is not None:
            return place.shape
        *outer, columns = place.tensor.shape
        if place.part is not None and place.part.rows:
            return (len(place.part.rows), *place.tensor.shape[1:])
        return (math.prod(outer), columns) if len(outer) > 1 else place.tensor.shape

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self.shape(name)
        as_rows = len(shape) == 1 and math.prod(stored) == shape[0]  # a vector's groups may be rows
        if not as_rows and squeezed(stored) != squeezed(shape):
            where = self.model.where(self.place(name).tensor)
            raise CheckpointError(f"{where} has shape {stored}, but the metadata implies {shape}")

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Weight:
        """Numbers or codes [rows, columns]."""
        place = self.place(name)
        raw, kind = self.raw(name), place.tensor.kind
        if place.part is not None and not place.part.keeps_codes:
            return own_columns(_converted(numbers(weights_of(raw[rows], kind)), place.part), columns)
        byte_range = _bytes_of(columns, (place.tensor.shape[-1], raw.shape[1]), kind)
        if byte_range is None:
            return own_columns(weights_of(raw[rows], kind), columns)
        return weights_of(raw[rows, byte_range], kind)

    def raw(self, name: str) -> Tensor:
        """The stored bytes, uint8 [rows, bytes of a row]; those of q and k in the order that Hugging Face has."""
        place = self.place(name)
        rows = self.model.rows(place.tensor)
        if place.expert is not None:
            each, count = math.prod(place.tensor.shape[1:-1]), math.prod(place.shape[:-1])
            first = place.expert * each + (place.half or 0) * count
            rows = rows[first : first + count]
        if place.part is not None and place.part.rows:
            rows = rows.view(place.tensor.shape[0], -1)[torch.tensor(place.part.rows)]
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2])
        return rows if heads is None else _split_halves(rows, heads, place.tensor)

    def _check_kinds(self) -> None:
        for name, place in self.places.items():
            self._check_factors(place.tensor)
            readable = (*WHOLE,) if name.endswith(WHOLE_NAMES) else (*NUMBERS, *GGUF_CODES)
            if place.tensor.kind not in readable:
                example = "" if name.endswith(WHOLE_NAMES) else ", for example Q4_K_M"
                raise CheckpointError(
                    f"{self.model.where(place.tensor)} is stored as {place.tensor.kind}; readable are "
                    f"{', '.join(readable)}: take a file in one of these{example}"
                )

    def _check_factors(self, tensor: GGUFTensor) -> None:
        factors = self.model.tensors.get(tensor.name.removesuffix(".weight") + ".scale")
        if tensor.kind == "NVFP4" and factors is not None:
            raise CheckpointError(
                f"{self.model.where(factors)} holds factors of {tensor.name}, which are not read: take a file in "
                "another type, or the safetensors"
            )


def weights_of(raw: Tensor, kind: str) -> Weight:
    """Rows of stored bytes, uint8 [N, bytes], as numbers or codes [N, K]."""
    if kind in GGUF_CODES:
        return GGUF_CODES[kind](raw)
    return raw.contiguous().view(NUMBERS[kind])


def _bytes_of(columns: slice, row: tuple[int, int], kind: str) -> slice | None:
    """Where those columns lie in a row of so many numbers and bytes; None where they are no whole blocks."""
    if columns == ALL:
        return ALL
    block = 1 if kind in NUMBERS else QuantFormat(kind.lower(), "gguf").along
    start, stop, _ = columns.indices(row[0])
    if start % block or stop % block:
        return None
    return slice(start * row[1] // row[0], stop * row[1] // row[0])


def _converted(x: Tensor, part: DerivedTensor) -> Tensor:
    """Numbers in another form: float32, since 1 + w loses bits of a w in bfloat16."""
    x = x.float()
    if part.columns:
        x = x[:, torch.tensor(part.columns)]
    return _NUMBERS[part.numbers](x)


_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "x": lambda x: x, "x - 1": lambda x: x - 1, "log(x)": torch.log, "log(-x)": lambda x: (-x).log(),
}  # fmt: skip


def _turned_heads(model: GGUFModel) -> dict[str, int]:
    """Heads of the projections whose rows llama.cpp's converter reorders. Layers without attention have none."""
    if not GGUF[model.architecture].pairs:
        return {}
    heads = model.need(f"{model.architecture}.attention.head_count", int)
    kv_heads = model.metadata.get(f"{model.architecture}.attention.head_count_kv", heads)
    return {"q_proj": heads, "k_proj": max(kv_heads) if isinstance(kv_heads, list) else kv_heads}


def _split_halves(rows: Tensor, heads: int, tensor: GGUFTensor) -> Tensor:
    """Undoes the interleaving of the rotary halves: rows (0, 1, 2, 3 …) of a head were (0, D/2, 1, D/2 + 1 …)."""
    if len(tensor.shape) == 1:  # a bias is one row of numbers
        rows = rows.view(tensor.shape[0], -1)
    if len(rows) % (2 * heads):
        raise CheckpointError(f"tensor {tensor.name} has {len(rows)} rows, which {heads} heads do not divide")
    pairs = rows.view(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
