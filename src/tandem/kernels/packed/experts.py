"""`PackedExperts`: a layer's routed experts on packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem import _core
from tandem._core import Workspace
from tandem.errors import CheckpointError, KernelError
from tandem.formats.codes import Weight, WeightCodes
from tandem.kernels.ops import ExpertBiases
from tandem.kernels.packed.expert_bytes import ExpertBytes, ExpertPlaces
from tandem.kernels.packed.file import PackedFile, Section
from tandem.kernels.packed.packable import (
    DEFAULT_GROUP,
    core_codes,
    core_source,
    made_here,
)
from tandem.planner.in_place import ROW_UNIT
from tandem.spec.activation import SILU, Activation

ExpertWeights = tuple[Weight, Weight, Weight]
"""gate, up, down."""

Sources = tuple[_core.Codes | Tensor, _core.Codes | Tensor, _core.Codes | Tensor]
"""The same, as the core takes them."""

WHOLE_ROWS = _core.WeightFormat("bf16_rows", 0, "f32")


class PackedExperts(ExpertBytes, ExpertPlaces):
    """`ExpertMatrices` on packed weights: the routed experts of one layer, MLPs of equal shape.

    fmt and group say how numbers are packed, as in `PackedMatrix`.
    The first expert loaded decides what the layer holds: gate, up and down may have a format each. Where gate and up
    have two, neither a GPU nor int8 activations take them.
    cpu_slots: how many experts there is memory for, when the others live elsewhere; 0: for all.
    int8_activations: x, and the activations between the two products, are rounded to int8 (`int8_activations.py`);
    loading weights that have no such kernels then raises KernelError. The packed bytes are the same.
    in_place: bfloat16 is not packed but used where it is, usually a mapped file, and kept alive; results have the same
    bits. (Other numbers, and views with gaps, are copied as they are.) There are no packed bytes then: what wants some
    raises KernelError.
    """

    def __init__(
        self,
        workspace: Workspace,
        num_experts: int,
        hidden: int,
        width: int,
        fmt: str = "bf16",
        activation: Activation = SILU,
        *,
        group: int = DEFAULT_GROUP,
        cpu_slots: int = 0,
        int8_activations: bool = False,
        in_place: bool = False,
    ) -> None:
        self.num_experts, self.hidden, self.width, self.cpu_slots = num_experts, hidden, width, cpu_slots
        self.numbers = made_here(fmt, group)
        self._workspace, self.activation = workspace, activation
        self.biases: ExpertBiases | None = None
        self.int8_activations = int8_activations
        self._in_place = in_place and fmt == "bf16" and hidden % ROW_UNIT == width % ROW_UNIT == 0
        first = WHOLE_ROWS if self._in_place else self.numbers
        self._formats = first, first, first  # of gate, up and down
        self._used: dict[int, Sources] = {}  # in place: whose memory they are
        self._empty = True
        self._make()

    def _make(self) -> None:
        sizes = self.num_experts, self.hidden, self.width
        act = self.activation.kind, self.activation.alpha, self.activation.limit
        self._core = _core.ExpertStore(
            self._workspace, *sizes, *self._formats, *act, self.cpu_slots, self.int8_activations
        )
        self._forward = self._core.forward
        if self.biases is not None:
            self._core.set_biases(*self.biases)

    def set_biases(self, biases: ExpertBiases) -> None:
        """Takes the biases of all experts, those elsewhere included, so that one may come without its own."""
        self.biases = biases
        self._core.set_biases(*biases)

    def load(self, expert: int, gate: Weight, up: Weight, down: Weight) -> None:
        """Packs one expert: gate and up [width, hidden], down [hidden, width]. The weights are only kept in place."""
        self.hold(gate, up, down, expert)
        sources = _sources((gate, up, down), self.in_place)
        self._core.load(expert, *sources)
        self._loaded([expert], [sources])

    def load_all(self, first: int, experts: Sequence[ExpertWeights]) -> None:
        """Packs experts first, first + 1, … in one parallel region, so that small ones share it."""
        self.load_each(range(first, first + len(experts)), experts)

    def load_each(self, ids: Sequence[int], experts: Sequence[ExpertWeights]) -> None:
        """Packs the experts `ids` in one parallel region."""
        self._hold_each(ids, experts)
        sources = [_sources(expert, self.in_place) for expert in experts]
        self._core.load_all(list(ids), sources)
        self._loaded(ids, sources)

    def _loaded(self, ids: Sequence[int], sources: Sequence[Sources]) -> None:
        self._empty = False
        if self.in_place:
            self._used.update(zip(ids, sources, strict=True))

    def pack_to(self, ids: Sequence[int], experts: Sequence[ExpertWeights], out: Tensor) -> None:
        """Packs experts as `load_each` would, one after the other into `out`, uint8 [their bytes]. No expert is kept,
        but their formats are the layer's from now on. An empty layer takes no memory for it."""
        self._hold_each(ids, experts)
        self._core.pack_to([_sources(expert, self.in_place) for expert in experts], out)
        self._empty = False

    def _hold_each(self, ids: Sequence[int], experts: Sequence[ExpertWeights]) -> None:
        for expert, (gate, up, down) in zip(ids, experts, strict=True):
            self.hold(gate, up, down, expert)

    def hold(self, gate: Weight, up: Weight, down: Weight, expert: int = 0) -> None:
        """Makes this the layer that such experts are loaded into. All are packed alike; the first one decides."""
        self._agree(expert, *(self._format_of(w) for w in (gate, up, down)))

    def _format_of(self, weight: Weight) -> _core.WeightFormat:
        if isinstance(weight, WeightCodes):
            return core_codes(weight).format
        return WHOLE_ROWS if self._in_place else self.numbers

    def _agree(
        self, expert: int, gate: _core.WeightFormat, up: _core.WeightFormat, down: _core.WeightFormat
    ) -> None:
        formats = self._formats
        if gate is formats[0] and up is formats[1] and down is formats[2]:
            return  # nearly always; comparing takes longer
        if (gate, up, down) == formats:
            return
        if not self._empty:
            raise KernelError(
                f"expert {expert}: gate is {gate}, up is {up}, down is {down}; "
                f"the layer holds {formats[0]}, {formats[1]} and {formats[2]}"
            )
        self._formats = gate, up, down
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

    def load_from(self, other: PackedExperts, ids: Sequence[int]) -> None:
        """Copies the experts `ids` out of a layer of the same shape and formats, on all workers."""
        if self._empty and self._formats != other._formats:
            self._formats = other._formats
            self._make()
        self._core.load_from(other.core, list(ids))
        self._empty = False

    def forget(self, expert: int) -> None:
        """The expert lives elsewhere from now on: its slot is free for another."""
        self._core.forget(expert)
        self._used.pop(expert, None)

    def adopt(self, file: PackedFile, section: Section) -> None:
        """Makes this layer, into which nothing was loaded, the one that was written as `section`."""
        if section.shape != self.shape:
            raise CheckpointError(f"{file.path}: {section.name} is {section.shape}, not {self.shape}")
        formats = [_core.WeightFormat(*each) for each in section.formats]
        self._formats = formats[0], formats[-2], formats[-1]  # one of gate and up is written once
        self._make()
        _core.adopt_experts(self._core, file.mapped, section.parts[0].offset)
        self._empty = False

    def share(self, other: PackedExperts) -> None:
        """Makes this layer, into which nothing was loaded, the same as `other`: both have all of its experts."""
        if not self._empty or self.shape != other.shape:
            raise KernelError("only an empty layer of the same shape can become another")
        self._core, self._forward, self._formats = other._core, other._forward, other._formats
        self.cpu_slots, self._empty, self._used = other.cpu_slots, other._empty, other._used

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_experts, self.hidden, self.width


def _sources(expert: ExpertWeights, in_place: bool) -> Sources:
    gate, up, down = (_whole_rows(w) if in_place else core_source(w) for w in expert)
    return gate, up, down


def _whole_rows(weight: Weight) -> _core.Codes | Tensor:
    """bfloat16 without gaps: nearly always the tensor itself."""
    if isinstance(weight, WeightCodes):
        return core_codes(weight)
    if weight.dtype == torch.bfloat16 and weight.is_contiguous():
        return weight  # nearly always; a view of it takes as long as all else
    return weight.detach().to(torch.bfloat16).contiguous()
