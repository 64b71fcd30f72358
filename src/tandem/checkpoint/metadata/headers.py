"""`HeadersOnly`: a checkpoint whose matrices have sizes and no numbers, for trying a model without loading."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tandem.checkpoint.source import Checkpoint, Lookup
from tandem.checkpoint.tables.readers import ignored
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat
from tandem.spec.shard import ALL
from tandem.spec.stored import StoredFormats


class HeadersOnly:
    """A `Checkpoint` that refuses what the one it is made from would refuse, as far as headers tell, and reads no
    weight. Its matrices are on PyTorch's meta device; its vectors are zeros, for models compute with those at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._of = checkpoint

    @property
    def path(self) -> Path:
        return self._of.path

    def path_of(self, module: str) -> Path:
        return self._of.path_of(module)

    def names(self) -> tuple[str, ...]:
        return self._of.names()

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def has_matrix(self, module: str) -> bool:
        return self._of.has_matrix(module)

    def get(self, name: str, shape: tuple[int, ...] | None = None, *, whole: bool = False) -> Tensor:
        view = self._of.get(name, shape, whole=whole)  # a view
        return torch.zeros(view.shape) if view.dim() < 2 else _empty(tuple(view.shape))

    def lookup(self, name: str, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        return self._of.lookup(name, shape)

    def table(
        self, module: str, shape: tuple[int, int], where: str = "map", progress: Callable[[int], None] = ignored
    ) -> Lookup:
        return self._of.table(module, shape)

    def weight(self, module: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL) -> Weight:
        self._of.check(module, shape)
        return _empty(shape)[rows, columns]

    def expert_weight(
        self, module: str, expert: int, shape: tuple[int, int, int], rows: slice = ALL, columns: slice = ALL
    ) -> Weight:
        self._of.check(module, shape)
        return _empty(shape[1:])[rows, columns]

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        self._of.check(module, shape)

    def format(self, module: str) -> QuantFormat:
        return self._of.format(module)

    def formats(self) -> StoredFormats:
        return self._of.formats()

    def expert_files(self) -> tuple[list[Path], bool]:
        return self._of.expert_files()

    def nbytes(self, experts: bool | None = None) -> int:
        return self._of.nbytes(experts)

    def identity(self) -> str:
        return self._of.identity()

    def read_ahead(self, layer: int, experts: bool | None = None) -> None: ...
    def forget(self, layer: int, experts: bool | None = None) -> None: ...
    def release(self, experts: bool | None = None) -> None: ...


@lru_cache(64)
def _empty(shape: tuple[int, ...]) -> Tensor:
    """One for all matrices of a shape: making them would take longer than checking them."""
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)
