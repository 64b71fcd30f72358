"""Faces of the C++ core's packed weights: `PackedMatrix` (a dense linear) and `PackedExperts` (a layer's experts).

Both run on a `Workspace`: a worker pool, one kernel tier, and scratch for one call at a time. Activations are bfloat16
or float32; float32 ones are rounded to bfloat16 at the entry, except with f32 weights: there everything is float32.
Weights come as numbers, to be packed as f32, bf16, int8 or int4, or as codes (`formats/codes.py`), which are packed as
they are. On every tier but AMX a row's result does not depend on the batch or the number of threads, to the bit. The
arrays of `_core` itself may come from any library that speaks DLPack.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem import _core
from tandem._core import WorkerPool, Workspace
from tandem.errors import CheckpointError, KernelError
from tandem.formats.codes import Weight, WeightCodes
from tandem.kernels.packed_file import PackedFile, Section

__all__ = ["PackedExperts", "PackedHeads", "PackedMatrix", "WeightCodes", "WorkerPool", "Workspace"]

PanelLayout = tuple[str, int, int, int, int, int, int, int, int]
"""format, columns, depth, padded depth, panels, panel bytes, offset of the scales, bytes of a scale, group."""

HEAD_ROWS = 32  # kernels compute this many output rows at a time: a head has a multiple of it
DEFAULT_GROUP = 32  # weights along K that share one scale in int8 and int4


def _packable(weight: Tensor) -> Tensor:
    """Kernels read contiguous float32 or bfloat16 in CPU memory."""
    weight = weight.detach().contiguous()
    return weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()


_SCALE_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def _scale_type(w: WeightCodes) -> str:
    """The core's name for it."""
    if w.halves is not None:
        return "bytes8" if w.group == 32 else "bytes16"
    if w.scales.dtype not in _SCALE_TYPES:
        raise KernelError(
            f"scales cannot be {w.scales.dtype}: take torch.float32, torch.bfloat16 or torch.float16"
        )
    return _SCALE_TYPES[w.scales.dtype]


def _codes(w: WeightCodes) -> _core.Codes:
    """The core's view of the same arrays."""
    names = w.fmt, w.group, _scale_type(w), w.block_rows
    return _core.Codes(w.codes, w.scales, w.offsets, *names, w.halves, w.offset_halves)


def _source(weight: Weight) -> _core.Codes | Tensor:
    return _codes(weight) if isinstance(weight, WeightCodes) else _packable(weight)


def _made_here(fmt: str, group: int) -> _core.WeightFormat:
    """What numbers are packed as: groups have bfloat16 scales, rows float32 ones."""
    return _core.WeightFormat(fmt, group, "bf16" if group else "f32")


FormatNames = tuple[str, int, str]
"""Format, group, scale type of a packed matrix."""


def _floats(data: memoryview) -> Tensor:
    """A copy of float32 bytes, which may be none."""
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data.nbytes else torch.empty(0)


class PackedMatrix:
    """`Linear` on packed weights: `matrix(x) -> [T, N]`. The tensor it is made from is not kept.

    fmt: "f32", "bf16", "int8" or "int4"; group: weights along K per scale (16, 32, 64, 128, 256; int8 also 0, one per
    row). `from_codes` takes weights that are quantised already.
    """

    def __init__(
        self,
        workspace: Workspace,
        weight: Tensor,
        bias: Tensor | None = None,
        fmt: str = "bf16",
        group: int = DEFAULT_GROUP,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._keep(_core.PackedMatrix(workspace, _packable(weight), _bias(bias), _made_here(fmt, group)))

    @classmethod
    def from_codes(
        cls, workspace: Workspace, weight: WeightCodes, bias: Tensor | None = None
    ) -> PackedMatrix:
        """Packs codes and scales as they are, without rounding."""
        matrix = cls.__new__(cls)
        matrix.out_features, matrix.in_features = weight.rows, weight.depth
        core = _core.PackedMatrix.from_codes(
            workspace, _codes(weight), weight.rows, weight.depth, _bias(bias)
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

    @property
    def bytes(self) -> _core.ByteRange:
        """Where the packed weights lie."""
        return self._core.bytes

    def read_next(self, upcoming: list[_core.ByteRange]) -> None:
        """What idle workers fetch while and after this matrix is multiplied."""
        self._core.read_next(upcoming)

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
        floats = _floats(file.view(bias)) if bias.nbytes else None
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
        return out[..., : self.out_features]


class PackedExperts:
    """`ExpertLayer` on packed weights: the routed experts of one layer, gated MLPs of equal shape.

    activation: "silu", "gelu", "gelu_tanh", "swiglu_clamp" (gate <= limit, |up| <= limit) or "swiglu_oai" (gpt-oss:
    clamped, gate * sigmoid(alpha * gate) * (up + 1)). fmt and group say how numbers are packed, as in `PackedMatrix`.
    The first expert loaded decides what the layer holds: gate and up in one format, down in the same or another.
    """

    def __init__(
        self,
        workspace: Workspace,
        num_experts: int,
        hidden: int,
        width: int,
        fmt: str = "bf16",
        activation: str = "silu",
        *,
        group: int = DEFAULT_GROUP,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> None:
        self.num_experts, self.hidden, self.width = num_experts, hidden, width
        self.numbers = _made_here(fmt, group)
        self._workspace, self._activation = workspace, activation
        self._alpha, self._limit = alpha, limit
        self._formats = self.numbers, self.numbers  # of gate and up, and of down
        self._empty = True
        self._make()

    def _make(self) -> None:
        sizes, (gate_up, down) = (self.num_experts, self.hidden, self.width), self._formats
        self._core = _core.ExpertLayer(
            self._workspace, *sizes, gate_up, down, self._activation, self._alpha, self._limit
        )
        self._forward = self._core.forward

    def load(
        self,
        expert: int,
        gate: Weight,
        up: Weight,
        down: Weight,
        *,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        """Packs one expert: gate and up [width, hidden], down [hidden, width]. The weights are not kept."""
        self.hold(gate, up, down, expert)
        biases = _bias(gate_bias), _bias(up_bias), _bias(down_bias)
        self._core.load(expert, _source(gate), _source(up), _source(down), *biases)
        self._empty = False

    def load_all(self, first: int, experts: Sequence[tuple[Weight, Weight, Weight]]) -> None:
        """Packs experts first, first + 1, … in one parallel region, so that small ones share it."""
        for expert, (gate, up, down) in enumerate(experts, first):
            self.hold(gate, up, down, expert)
        self._core.load_all(first, [(_source(g), _source(u), _source(d)) for g, u, d in experts])
        self._empty = False

    def hold(self, gate: Weight, up: Weight, down: Weight, expert: int = 0) -> None:
        """Makes this the layer that such experts are loaded into. All are packed alike; the first one decides."""
        self._agree(expert, *(self._format_of(w) for w in (gate, up, down)))

    def _format_of(self, weight: Weight) -> _core.WeightFormat:
        return _codes(weight).format if isinstance(weight, WeightCodes) else self.numbers

    def _agree(
        self, expert: int, gate: _core.WeightFormat, up: _core.WeightFormat, down: _core.WeightFormat
    ) -> None:
        if gate != up:
            raise KernelError(f"expert {expert}: gate is {gate}, up is {up}; both must have one format")
        if (gate, down) == self._formats:
            return
        if not self._empty:
            raise KernelError(
                f"expert {expert}: gate and up are {gate}, down is {down}; "
                f"the layer holds {self._formats[0]} and {self._formats[1]}"
            )
        self._formats = gate, down
        self._make()

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """sum over k of weights[t, k] * expert[ids[t, k]](x[t]), [T, hidden]; ids outside [0, E) are skipped.

        ids int32 [T, k], weights float32 [T, k]. `out` may be bfloat16 or float32; `add` adds to it.
        """
        if out is None:
            out = x.new_empty((x.shape[0], self.hidden))
            add = False
        self._forward(x, ids, weights, out, add)
        return out

    def bytes(self, first: int, count: int) -> _core.ByteRange:
        """Where the experts [first, first + count) lie."""
        return self._core.bytes(first, count)

    def read_next(self, upcoming: list[_core.ByteRange]) -> None:
        """What idle workers fetch while and after this layer is computed."""
        self._core.read_next(upcoming)

    def load_packed(self, expert: int, packed: Tensor) -> None:
        """The inverse of `packed`."""
        self._core.load_packed(expert, packed)

    @property
    def core(self) -> _core.ExpertLayer:
        """The layer in the C++ core."""
        return self._core

    @property
    def tier(self) -> str:
        """The tier whose kernels this layer runs on."""
        return self._core.tier

    def layout(self) -> tuple[PanelLayout, PanelLayout]:
        """Of the packed gate_up, whose panels alternate 16 rows of gate and 16 of up, and of the down that follows."""
        gate_up, down = self._core.layout()
        return gate_up, down

    def packed(self, expert: int) -> Tensor:
        """A copy of one expert's packed bytes, uint8 [bytes_per_expert]."""
        out = torch.empty(self.bytes_per_expert, dtype=torch.uint8)
        self._core.copy_packed(expert, out)
        return out

    @property
    def bytes_per_expert(self) -> int:
        """Packed bytes of one expert, padding and scales included."""
        return self._core.bytes_per_expert

    # -- as bytes, see packed_cache.py ---

    def adopt(self, file: PackedFile, section: Section) -> None:
        """Makes this layer, into which nothing was loaded, the one that was written as `section`."""
        if section.shape != self.shape:
            raise CheckpointError(f"{file.path}: {section.name} is {section.shape}, not {self.shape}")
        gate_up, down = section.formats
        self._formats = _core.WeightFormat(*gate_up), _core.WeightFormat(*down)
        self._make()
        panels, *floats = section.parts
        biases = _floats(file.view(floats[0])), _floats(file.view(floats[1]))
        _core.adopt_experts(self._core, file.mapped, panels.offset, *biases)
        self._empty = False

    @property
    def formats(self) -> tuple[FormatNames, ...]:
        """Of gate and up, and of down."""
        return _core.expert_formats(self._core)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_experts, self.hidden, self.width

    @property
    def packed_bytes(self) -> int:
        return self.bytes_per_expert * self.num_experts

    def parts(self) -> tuple[memoryview, ...]:
        """Panels of all experts and both biases as they lie in memory; valid as long as this object."""
        return _core.expert_bytes(self._core)
