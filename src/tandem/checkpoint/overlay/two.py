"""`TwoCheckpoints`: a `Checkpoint` of two, each of which has some of the names."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from tandem.checkpoint.source import Checkpoint, Lookup
from tandem.checkpoint.tables.readers import ignored
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat
from tandem.spec.shard import ALL


class TwoCheckpoints(ABC):
    """`path` is the first one's. What a subclass says: who has a name, and what counts for both together."""

    def __init__(self, first: Checkpoint, other: Checkpoint) -> None:
        self._first, self._other = first, other

    @abstractmethod
    def _is_other(self, name: str) -> bool:
        """Whether the other one has this tensor or module, or should have it."""

    @property
    def path(self) -> Path:
        return self._first.path

    def path_of(self, module: str) -> Path:
        return self._of(module).path_of(module)

    def names(self) -> tuple[str, ...]:
        first = (name for name in self._first.names() if not self._is_other(name))
        return (*first, *filter(self._is_other, self._other.names()))

    def __contains__(self, name: str) -> bool:
        return name in self._of(name)

    def has_matrix(self, module: str) -> bool:
        return self._of(module).has_matrix(module)

    def get(self, name: str, shape: tuple[int, ...] | None = None, *, whole: bool = False) -> Tensor:
        return self._of(name).get(name, shape, whole=whole)

    def lookup(self, name: str, shape: tuple[int, int]) -> Lookup:
        return self._of(name).lookup(name, shape)

    def table(
        self, module: str, shape: tuple[int, int], where: str = "map", progress: Callable[[int], None] = ignored
    ) -> Lookup:
        return self._of(module).table(module, shape, where, progress)

    def weight(self, module: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL) -> Weight:
        return self._of(module).weight(module, shape, rows, columns)

    def expert_weight(
        self, module: str, expert: int, shape: tuple[int, int, int], rows: slice = ALL, columns: slice = ALL
    ) -> Weight:
        return self._of(module).expert_weight(module, expert, shape, rows, columns)

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        self._of(module).check(module, shape)

    def format(self, module: str) -> QuantFormat:
        return self._of(module).format(module)

    def identity(self) -> str:
        """The same files in another place are others."""
        identities = (self._first.identity(), self._other.identity(), str(self._other.path.resolve()))
        return hashlib.sha256(repr(identities).encode()).hexdigest()

    def _of(self, name: str) -> Checkpoint:
        return self._other if self._is_other(name) else self._first
