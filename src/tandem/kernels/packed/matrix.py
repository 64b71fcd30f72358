"""`PackedMatrix`, a dense linear on packed weights, and `PackedHeads`, one such matrix per head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem import _core
from tandem._core import Workspace
from tandem.formats.codes import Blocks, WeightCodes
from tandem.kernels.packed.file import PackedFile, Section
from tandem.kernels.packed.packable import (
    DEFAULT_GROUP,
    FormatNames,
    PanelLayout,
    bias_of,
    core_codes,
    floats_of,
    made_here,
    packable,
)

PANEL_ROWS = 16  # a panel's, which are packed together
HEAD_ROWS = 32  # kernels compute this many output rows at a time: a head has a multiple of it


class PackedMatrix:
    """`Linear` on packed weights: `matrix(x) -> [T, N]`. The tensor it is made from is not kept.

    fmt: "f32", "bf16", "int8" or "int4"; group: weights along K per scale (16, 32, 64, 128, 256; int8 also 0, one per
    row). `from_codes` takes weights that are quantised already.
    """

    def __init__(
        self,
        workspace: Workspace,
        weight: Tensor | Blocks,
        bias: Tensor | None = None,
        fmt: str = "bf16",
        group: int = DEFAULT_GROUP,
    ) -> None:
        blocks = _whole_panels((weight,) if isinstance(weight, Tensor) else weight)
        self.out_features, self.in_features = sum(map(len, blocks)), blocks[0].shape[1]
        self._keep(_core.PackedMatrix(workspace, blocks, bias_of(bias), made_here(fmt, group)))

    @classmethod
    def from_codes(
        cls, workspace: Workspace, weight: WeightCodes, bias: Tensor | None = None
    ) -> PackedMatrix:
        """Packs codes and scales as they are, without rounding."""
        matrix = cls.__new__(cls)
        matrix.out_features, matrix.in_features = weight.rows, weight.depth
        core = _core.PackedMatrix.from_codes(
            workspace, core_codes(weight), weight.rows, weight.depth, bias_of(bias)
        )
        matrix._keep(core)
        return matrix

    def _keep(self, core: _core.PackedMatrix) -> None:
        self._core = core
        self._multiply = core.multiply

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty((x.shape[0], self.out_features), dtype=out_dtype)
        self._multiply(x, out)
        return out

    def with_int8_activations(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """As a call, with x rounded to int8 before (`int8_activations.py`).

        Raises KernelError where the weights' format has no such kernels.
        """
        out = x.new_empty((x.shape[0], self.out_features), dtype=out_dtype)
        self._multiply(x, out, True)
        return out

    @property
    def bytes(self) -> _core.ByteRange:
        """Where the packed weights lie."""
        return self._core.bytes

    def read_next(self, upcoming: list[_core.ByteRange]) -> None:
        """Sets the ranges that idle workers fetch while and after this matrix is multiplied."""
        self._core.read_next(upcoming)

    def layout(self) -> PanelLayout:
        """Layout of its panels; raises KernelError where the GPU kernels do not read them."""
        return self._core.layout()

    @property
    def tier(self) -> str:
        """The tier whose kernels this matrix runs on."""
        return self._core.tier

    def dequantised(self) -> Tensor:
        """The weights that the packed codes stand for, float32 [N, K]."""
        out = torch.empty((self.out_features, self.in_features), dtype=torch.float32)
        self._core.dequantise(out)
        return out

    # -- as bytes, see packed_cache.py ---

    @classmethod
    def adopt(cls, workspace: Workspace, file: PackedFile, section: Section) -> PackedMatrix:
        """The matrix that was written as `section`; its panels stay in the mapped file."""
        matrix = cls.__new__(cls)
        matrix.out_features, matrix.in_features = rows, depth = section.shape
        panels, bias = section.parts
        floats = floats_of(file.view(bias)) if bias.nbytes else None
        core = _core.adopt_matrix(
            workspace, section.formats[0], rows, depth, file.mapped, panels.offset, floats
        )
        matrix._keep(core)
        return matrix

    @property
    def formats(self) -> tuple[FormatNames, ...]:
        return (_core.matrix_format(self._core),)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out_features, self.in_features

    @property
    def packed_bytes(self) -> int:
        return self._core.packed_bytes

    def parts(self) -> tuple[memoryview, ...]:
        """Panels and bias as they lie in memory; valid as long as this object."""
        return _core.matrix_bytes(self._core)


def _whole_panels(blocks: Blocks) -> list[Tensor]:
    """The blocks as the core takes them; one, where panels would hold rows of two."""
    if any(len(block) % PANEL_ROWS for block in blocks[:-1]):
        blocks = (torch.cat(blocks),)
    return [packable(block) for block in blocks]


class PackedHeads:
    """`PerHead` on packed weights [H, N, K]: one matrix per head, all in one parallel region."""

    def __init__(self, workspace: Workspace, weights: Tensor, fmt: str = "bf16") -> None:
        self.heads, self.out_features, depth = weights.shape
        padded = F.pad(weights, (0, 0, 0, -self.out_features % HEAD_ROWS))
        self._rows = padded.shape[1]
        self._multiply = PackedMatrix(workspace, padded.reshape(-1, depth), None, fmt)._core.multiply_heads

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self.heads, self._rows))
        self._multiply(x, out)
        own = out[..., : self.out_features]
        return own.contiguous() if self.heads == 1 else own  # of one head, joining heads would not copy it
