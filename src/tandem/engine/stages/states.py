"""States of a model whose layers are divided among GPUs: each stage's lie on its own GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tandem.engine.state.arrays import SlotMemory, StateArrays, allocate
from tandem.models.staged import Stage
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig


class SlotRow:
    """One slot, of which every stage has a part."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    def copy_(self, source: SlotRow, non_blocking: bool = False) -> SlotRow:
        for own, other in zip(self.parts, source.parts, strict=True):
            own.copy_(other, non_blocking=non_blocking)
        return self


class SlotRows:
    """Slots of all stages, as `SlotPool` takes them."""

    def __init__(self, memories: list[SlotMemory]) -> None:
        """memories: uint8 [slots, bytes of one], of each stage."""
        self._memories = memories

    def __len__(self) -> int:
        return len(self._memories[0])

    def __getitem__(self, slot: int) -> SlotRow:
        return SlotRow([memory[slot] for memory in self._memories])


def allocate_stages(plan: Plan, model: ModelConfig, stages: Sequence[Stage]) -> StateArrays:
    """Arrays of all states in the model's order. Pages have the same numbers on all GPUs."""
    parts = [_of_stage(plan, replace(model, layers=model.layers[each.first : each.end]), each) for each in stages]
    return StateArrays([arrays for part in parts for arrays in part.arrays], SlotRows([part.slots for part in parts]))


def _of_stage(plan: Plan, part: ModelConfig, stage: Stage) -> StateArrays:
    """part: the stage's layers."""
    layout = part.state_layout(plan.dtype, plan.page_size, plan.draft_tokens)
    return allocate(layout, plan.num_pages, stage.device, plan.num_slots, plan.num_window_pages)
