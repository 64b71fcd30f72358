"""`ForwardState`: one batch on its way through the layers. It may pause between any two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tandem.kernels.ops import Addend, ExpertCounts, Linear
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.step_rows import StepRows, step_rows
from tandem.models.batch import ForwardBatch

Arrays = tuple[Tensor, ...]
"""The tensors of one state, in the order in which it declares them."""

States = Sequence[Arrays]
"""States of a model: one for each of its `StateLayout`. Those of a block: the ones that its body declared."""


class Mix(Protocol):
    """How a block's result returns to several streams."""

    def of(self, rows: Tensor) -> Mix:
        """The same of some rows."""
        ...

    def left(self, streams: Tensor, y: Tensor) -> Tensor:
        """Streams [T, n, hidden] mixed, and the result y [T, hidden] shared out to them."""
        ...


@dataclass(slots=True)
class ForwardState:
    """residual [T, hidden], or [T, n, hidden] of n streams: without what the last block computed; pending [T, hidden]:
    that, None at the start; mix: how it returns to several streams; addend: what is still to be added to it.

    links: which tokens the last layer that chose has chosen, by its number. A batch's rows and indices do not change
    meanwhile. tallies: where its MoE layers count, by their numbers; None: where steps do, which is no place for a pass
    that others overtake.
    """

    batch: ForwardBatch
    residual: Tensor
    pending: Tensor | None = None
    mix: Mix | None = None
    addend: Addend | None = None
    links: dict[int, SelectedKeys | None] = field(default_factory=dict)
    tallies: Sequence[ExpertCounts] | None = None
    indices: StepRows | None = None
    begun: tuple[object, Tensor] | None = None  # a block's first product, made with the norm before it

    def product(self, matrix: Linear, x: Tensor) -> Tensor:
        """x times a block's first matrix."""
        begun, self.begun = self.begun, None
        return begun[1] if begun is not None and begun[0] is matrix else matrix(x)

    def of(self, rows: Tensor) -> ForwardState:
        """The same pass for some of its rows, or for all of them."""
        if len(rows) == len(self.residual):
            return self
        pending = None if self.pending is None else self.pending[rows]
        mix = None if self.mix is None else self.mix.of(rows)
        addend = None if self.addend is None else self.addend.of(rows)
        return ForwardState(self.batch, self.residual[rows], pending, mix, addend)

    def first(self, batch: ForwardBatch) -> ForwardState:
        """The same pass for its first rows, which are this batch's. Where no layer reads another's choice."""
        shorter = self.of(torch.arange(len(batch.input_ids), device=self.residual.device))
        shorter.batch, shorter.tallies = batch, self.tallies
        return shorter

    @property
    def rows(self) -> StepRows:
        """Rows of the batch, computed on first use."""
        if self.indices is None:
            self.indices = step_rows(self.batch)
        return self.indices
