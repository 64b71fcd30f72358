"""`StagedModel`: a model whose layers are divided among devices. A stage is a run of layers on one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.ops import Addend, Ops
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.foresight import operators
from tandem.models.model import Model
from tandem.models.passing import ForwardState, States

Carry = Callable[[Tensor], Tensor]
"""A tensor of one stage → the same where the next one reads it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first` to `end` - 1, and the operations that compute them. Several stages may be on one device."""

    first: int
    end: int
    ops: Ops
    device: torch.device

    def current(self) -> AbstractContextManager[object]:
        """Around its kernels: Triton launches them on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class StagedBuilder(Builder):
    """Builds every layer with its stage's operations; the embedding with the first one's, the head with the last's."""

    def __init__(self, stages: Sequence[Stage], *arguments: Any, **named: Any) -> None:
        """arguments: a `Builder`'s; its operations are the first stage's."""
        super().__init__(*arguments, **named)
        self.stages = tuple(stages)
        self._ropes_of = [self._ropes, *({} for _ in self.stages[1:])]

    def place(self, layer: int) -> None:
        number = stage_of(self.stages, layer)
        stage = self.stages[number]
        self.ops, self._ropes = stage.ops, self._ropes_of[number]
        if stage.device.type == "cuda":  # which kernels that put weights in order run on
            torch.cuda.set_device(stage.device)


@dataclass(slots=True)
class StagedPass(ForwardState):
    """A pass that is where stage number `stage` is."""

    stage: int = 0

    def carry(self, stage: int, batch: ForwardBatch, carry: Carry) -> None:
        """Goes on to another stage. batch: the same one, on that stage's device. Nothing is added up before, so the
        sums round as they do within a stage."""
        assert self.mix is None, "several streams are not carried"
        self.stage, self.batch, self.indices = stage, batch, None
        self.residual = carry(self.residual)
        if self.pending is not None:
            self.pending = carry(self.pending)
        if self.addend is not None:
            gate = self.addend.gate
            self.addend = Addend(carry(self.addend.x), None if gate is None else carry(gate))


class StagedModel(Model):
    """As a `Model`, wherever a batch lies: each stage reads a copy of it on its own device."""

    def __init__(self, b: StagedBuilder) -> None:
        super().__init__(b)
        self.stages = b.stages
        # A layer asks no router that is elsewhere.
        parts = (self.layers[stage.first : stage.end] for stage in self.stages)
        self._operators = [operator for part in parts for operator in operators(part)]

    def forward(self, batch: ForwardBatch, states: States) -> Tensor:
        p = self.begin(batch)
        for index in range(self.depth):
            self.layer(p, index, states)
        return self.logits(p, states)

    def begin(self, batch: ForwardBatch) -> StagedPass:
        first = self.stages[0]
        with first.current():
            batch = on_device(batch, first.device)
            return StagedPass(batch, self._embedded(batch))

    def layer(self, p: ForwardState, index: int, states: States) -> None:
        with self._at(p, stage_of(self.stages, index)).current():
            super().layer(p, index, states)

    def logits(self, p: ForwardState, states: States) -> Tensor:
        with self._at(p, len(self.stages) - 1).current():
            return super().logits(p, states)

    def run_stage(self, p: StagedPass, states: States) -> None:
        """All layers of the stage where the pass is."""
        stage = self.stages[p.stage]
        for index in range(stage.first, stage.end):
            self.layer(p, index, states)

    def _at(self, p: ForwardState, number: int) -> Stage:
        """The stage, where the pass is from now on."""
        assert isinstance(p, StagedPass)
        stage = self.stages[number]
        if p.stage != number:
            p.carry(number, on_device(p.batch, stage.device), lambda each: each.to(stage.device, non_blocking=True))
        return stage


def stage_of(stages: Sequence[Stage], layer: int) -> int:
    """Number of the stage that has a layer."""
    return next(number for number, stage in enumerate(stages) if layer < stage.end)


def on_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """The batch itself where it is there already, else a copy, ordered behind what both devices were given."""
    if batch.input_ids.device == device:
        return batch
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    copies: dict[str, Any] = {
        name: each.to(device, non_blocking=True) for name, each in tensors.items() if isinstance(each, Tensor)
    }
    copies["windows"] = None if batch.windows is None else on_device(batch.windows, device)
    return replace(batch, **copies)
