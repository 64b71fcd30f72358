"""`Residency`: where every routed expert of a model is: a slot on the GPU, a slot in CPU memory, or its file.

The file is the home of every expert, and never changes; memory has copies. So `drop` writes nothing back. Kernels,
graphs and the hand-off see one number of an expert: its slot on the GPU, or `NO_SLOT`, "the host computes it". What
that means is asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.errors import EngineError

NO_SLOT = -1  # on the GPU
NOBODY = -1  # in place of an expert's id: skipped


class Location(IntEnum):
    """A memory that experts are computed from, or wait in."""

    GPU = 0
    CPU = 1
    FILE = 2


class Residency:
    """Locations of [layers, experts], as the policy knows them; steps read `SlotTables`. One thread changes them. C++
    notes exchanges (`note_exchanges`). Else: `load` file → CPU, `drop` CPU → file, `rise` CPU → GPU, `sink` GPU → CPU;
    each raises EngineError, and changes nothing, where the expert is elsewhere or the slot is taken."""

    def __init__(self, slots: Tensor, in_file: Tensor | None = None) -> None:
        """slots int [layers, experts]: on the GPU, or `NO_SLOT`; in_file bool: of these, who is in no memory."""
        self.slots: npt.NDArray[np.int64] = slots.numpy().astype(np.int64)  # C++ reads it, and `note_exchanges` writes
        self._in_file = np.zeros(self.slots.shape, bool) if in_file is None else in_file.numpy().copy()
        if (self._in_file & (self.slots >= 0)).any():
            raise EngineError("an expert has a slot on the GPU and is said to be in its file alone")

    def location(self, layer: int, expert: int) -> Location:
        if self.slots[layer, expert] >= 0:
            return Location.GPU
        return Location.FILE if self._in_file[layer, expert] else Location.CPU

    def on(self, location: Location) -> npt.NDArray[np.bool_]:
        """Whose location this is, [layers, experts]."""
        gpu = self.slots >= 0
        if location is Location.GPU:
            return gpu
        return self._in_file.copy() if location is Location.FILE else ~gpu & ~self._in_file

    def load(self, layer: int, expert: int) -> None:
        self._leave(layer, expert, Location.FILE)
        self._in_file[layer, expert] = False

    def drop(self, layer: int, expert: int) -> None:
        self._leave(layer, expert, Location.CPU)
        self._in_file[layer, expert] = True

    def rise(self, layer: int, expert: int, slot: int) -> None:
        """To that slot of the layer's on the GPU."""
        self._leave(layer, expert, Location.CPU)
        if slot < 0 or (self.slots[layer] == slot).any():
            raise EngineError(f"slot {slot} of MoE layer {layer} is no free one")
        self.slots[layer, expert] = slot

    def sink(self, layer: int, expert: int) -> None:
        self._leave(layer, expert, Location.GPU)
        self.slots[layer, expert] = NO_SLOT

    def _leave(self, layer: int, expert: int, location: Location) -> None:
        if (actual := self.location(layer, expert)) is not location:
            raise EngineError(f"expert {expert} of MoE layer {layer} is in {actual.name}, not in {location.name}")


def experts_on(location: Location, slots: Tensor) -> list[int]:
    """Experts of a location, ascending; none is in the file. slots int [experts]: on the GPU, or `NO_SLOT`."""
    return on_location(location, slots).nonzero().flatten().tolist()


def on_location(location: Location, slots: Tensor) -> Tensor:
    """bool, as slots: who is on the GPU, or computed by the host."""
    return slots >= 0 if location is Location.GPU else slots < 0


def left_to_host(ids: Tensor, slots: Tensor) -> Tensor:
    """ids of chosen experts, `NOBODY` for those that have a slot on the GPU."""
    return torch.where(slots >= 0, NOBODY, ids)


def packed_slots(here: Tensor) -> Tensor:
    """int32 [experts]: slots one behind the other for those whose bool [experts] is set, else `NO_SLOT`."""
    return torch.where(here, here.cumsum(0) - 1, NO_SLOT).int()


def slots_in_use(slots: Tensor) -> int:
    """How many slots a layer has on the GPU, whose experts' are [experts]."""
    return int(slots.max()) + 1


def count_on(location: Location, slots: Tensor | Sequence[int]) -> int:
    """How many of a layer's experts are there."""
    return int(on_location(location, torch.as_tensor(slots)).sum())
