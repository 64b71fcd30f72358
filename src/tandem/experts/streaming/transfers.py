"""`Transfers`: parts of layers on their way through a ring of slots on the GPU, in the order in which layers run.

A copy is given before its part of the ring is free: the bus waits for the GPU's marks by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.experts.streaming.copy_stream import CopyStream
from tandem.spec.gpu_scratch import StagingRing

Run = tuple[int, int, int]
"""Where copied from, where to in a part of the ring, and bytes."""


class Transferable(Protocol):
    """A layer's experts in CPU memory."""

    @property
    def cpu_slots(self) -> int: ...

    def runs(self, cpu_slots: Iterable[int]) -> list[Run]:
        """Copies of these slots, one after the other in a part of the ring."""
        ...


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Places of a layer in one part of the ring: `count` of them, from `first` on."""

    layer: int
    first: int
    count: int


class Transfers:
    """Deliveries of one step at a time. They have numbers; part number % parts of the ring is theirs."""

    def __init__(
        self, layers: Sequence[Transferable | None], ring: StagingRing, bus: CopyStream, device: torch.device
    ) -> None:
        self._layers, self._ring, self._bus = layers, ring, bus
        self._memory = torch.empty(ring.nbytes, dtype=torch.uint8, device=device)
        bus.copy_after(bus.computing_given())  # what the GPU was given may still read this memory: weights are made so
        self._order: dict[int, npt.NDArray[np.int32]] = {}  # of a layer's slots
        self._runs: dict[int, dict[_Transfer, list[Run]]] = {}  # of a layer, in this order; slots never move
        self._free: list[object] = [None] * ring.parts  # marks: the part was unpacked
        self._arrived: list[object] = [None] * ring.parts
        self._list: list[_Transfer] = []
        self._of: dict[int, range] = {}
        self._counts: Mapping[int, int] = {}
        self._begun = self.released = 0
        self.bytes = 0  # since the start

    def __del__(self) -> None:
        """Waits for copies that no step has taken, as of a prompt that was given up: they would write to memory that is
        another's by then, out of memory that is gone."""
        with suppress(Exception):  # the GPU may be gone, too
            if self.failed:
                self._bus.finish()

    def begin(self, counts: Mapping[int, int], whole: bool) -> None:
        """Begins a step in which `counts` slots of each layer are streamed. whole: there are parts for all slots,
        whether they are streamed or not."""
        if self.failed:
            self._bus.finish()
        self._counts, self._list, self._of = counts, [], {}
        for layer, count in counts.items():
            first, each = len(self._list), self._ring.experts
            count = _of(self._layers, layer).cpu_slots if whole else count
            self._list += [_Transfer(layer, i, min(each, count - i)) for i in range(0, count, each)]
            self._of[layer] = range(first, len(self._list))
        self._begun = self.released = 0
        for _ in range(self._ring.parts):
            self._give()

    @property
    def failed(self) -> bool:
        """Whether the step has not taken what was given for it."""
        return self.released < self._begun

    @property
    def ended(self) -> bool:
        """Whether the step has taken all."""
        return self.released == len(self._list)

    def reorder(self, layer: int, cpu_slots: npt.NDArray[np.int32]) -> None:
        """Its slots are streamed in this order, in the next step."""
        if np.array_equal(self._order_of(layer), cpu_slots):
            return
        self._order[layer] = cpu_slots
        self._runs.pop(layer, None)

    def _order_of(self, layer: int) -> npt.NDArray[np.int32]:
        if layer not in self._order:
            self._order[layer] = np.arange(_of(self._layers, layer).cpu_slots, dtype=np.int32)
        return self._order[layer]

    def of(self, layer: int) -> range:
        """Numbers of a layer's."""
        return self._of.get(layer, range(0))

    def count(self, number: int) -> int:
        """Places in a delivery, as far as there is room."""
        return self._list[number].count

    def memory(self, number: int) -> Tensor:
        """Where it is from `arrive` to `read`."""
        return self._memory[number % self._ring.parts * self._ring.part_bytes :]

    def arrive(self, number: int) -> None:
        """Work that the GPU is given from now on begins when the delivery is there."""
        self._bus.compute_after(self._arrived[number % self._ring.parts])

    def read(self, number: int) -> None:
        """The GPU was given all that reads it. Gives the next one's copies."""
        self._free[number % self._ring.parts] = self._bus.computing_given()
        self.released += 1
        self._give()

    def copied_gbps(self) -> float:
        """GB/s of the bus: a part of each layer is copied from where it lies, between steps."""
        total, started = 0, perf_counter()
        for layer in (layer for layer in self._layers if layer is not None):
            for source, target, nbytes in layer.runs(range(min(self._ring.experts, layer.cpu_slots))):
                self._bus.copy(source, self._memory.data_ptr() + target, nbytes)
                total += nbytes
        self._bus.finish()
        return total / (perf_counter() - started) / 1e9

    def _give(self) -> None:
        if self._begun == len(self._list):
            return
        delivery, turn = self._list[self._begun], self._begun % self._ring.parts
        remaining = max(0, self._counts[delivery.layer] - delivery.first)
        self._begun += 1
        self._bus.copy_after(self._free[turn])
        to = self._memory.data_ptr() + turn * self._ring.part_bytes
        for source, target, nbytes in self._runs_of(replace(delivery, count=min(remaining, delivery.count))):
            self._bus.copy(source, to + target, nbytes)
            self.bytes += nbytes
        self._arrived[turn] = self._bus.copies_given()

    def _runs_of(self, delivery: _Transfer) -> list[Run]:
        runs = self._runs.setdefault(delivery.layer, {})
        if delivery not in runs:
            layer, first = _of(self._layers, delivery.layer), delivery.first
            runs[delivery] = layer.runs(self._order_of(delivery.layer)[first : first + delivery.count].tolist())
        return runs[delivery]


def _of(layers: Sequence[Transferable | None], index: int) -> Transferable:
    layer = layers[index]
    assert layer is not None
    return layer
