"""`InMemory`: what operations on the CPU have in common."""

from __future__ import annotations

from torch import Tensor

from tandem.formats.codes import WeightCodes
from tandem.kernels.ops import Lookup
from tandem.kernels.ranks.group import Group


class InMemory:
    """Tensors are read where they lie, and codes of every kind."""

    fuse_shared_add = False
    group: Group | None = None

    def resident(self, tensor: Tensor) -> Tensor:
        return tensor

    def lookup(self, find: Lookup, rows: int, in_ram: bool = False) -> Lookup:
        return find

    def reads(self, weight: WeightCodes) -> bool:
        return True
