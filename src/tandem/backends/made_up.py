"""`MadeUpExperts`: experts of a model whose weights are not there, for measurements.

All are views of one pool of random numbers, so that a layer costs no memory before it is packed.
"""

from __future__ import annotations

import math
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from tandem.formats.quant_format import QuantFormat
from tandem.spec.shard import ALL
from tandem.spec.stored import UNQUANTISED, StoredFormats

POOL_WEIGHTS, STARTS = 1 << 26, 4096
WEIGHT_SIZE = 0.02  # standard deviation, as models are initialised


class MadeUpExperts:
    """A checkpoint as far as experts are read from it: in bfloat16, each matrix by its own name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        numbers = torch.randn(POOL_WEIGHTS, generator=torch.Generator().manual_seed(0))
        self._pool = (numbers * WEIGHT_SIZE).to(torch.bfloat16)

    def has_matrix(self, module: str) -> bool:
        """Names without an expert's number are of tensors that hold all of them: there are none."""
        return any(part.isdigit() for part in module.rpartition(".layers.")[2].split(".")[1:])

    def __contains__(self, name: str) -> bool:
        return "gate_up" not in name

    def get(self, name: str, shape: tuple[int, ...], *, whole: bool = False) -> Tensor:
        size, first = math.prod(shape), crc32(name.encode()) % STARTS * 64
        room = POOL_WEIGHTS - STARTS * 64
        numbers = self._pool[first : first + min(size, room)]
        return (numbers if size <= room else numbers.repeat(-(-size // room))[:size]).view(shape)

    def weight(self, module: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL) -> Tensor:
        own = len(range(*rows.indices(shape[0]))), len(range(*columns.indices(shape[1])))
        return self.get(module, own)

    def format(self, module: str) -> QuantFormat:
        return QuantFormat("bf16")

    def formats(self) -> StoredFormats:
        return UNQUANTISED

    def expert_files(self) -> tuple[list[Path], bool]:
        return [], True

    def identity(self) -> str:
        return "made up"

    def nbytes(self, experts: bool | None = None) -> int:
        return 0

    def read_ahead(self, layer: int, experts: bool | None = None) -> None: ...

    def forget(self, layer: int, experts: bool | None = None) -> None: ...

    def release(self, experts: bool | None = None) -> None: ...
