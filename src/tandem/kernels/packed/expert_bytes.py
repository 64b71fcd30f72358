"""Bytes of a layer's packed experts, and the slots where they lie: for whatever moves experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem._core import ByteRange, ExpertStore, expert_bytes, expert_formats
from tandem.errors import KernelError
from tandem.kernels.packed.packable import FormatNames, PanelLayout


class ExpertPlaces:
    """Experts that somebody else's copies bring and take; what cannot be raises KernelError."""

    _core: ExpertStore

    def reserve(self, expert: int) -> int:
        """A CPU slot for an expert on its way here, which nobody uses until `assign`, or until `release` frees it."""
        return self._core.reserve(expert)

    def assign(self, expert: int, cpu_slot: int) -> None:
        """The expert has arrived in the slot that was reserved for it."""
        self._core.assign(expert, cpu_slot)

    def release(self, cpu_slot: int) -> None:
        """Nobody comes into the reserved slot."""
        self._core.release(cpu_slot)

    def cpu_slot_of(self, expert: int) -> int:
        return self._core.cpu_slot_of(expert)

    def pieces(self, cpu_slot: int) -> list[tuple[int, int, int]]:
        """Where a slot lies: (offset in an expert's packed bytes, address, bytes), one for each memory node or two."""
        return self._core.pieces(cpu_slot)

    def all_cpu_slots(self) -> list[ByteRange]:
        """Ranges in which all slots lie, for each memory node; empty as long as nothing was loaded."""
        return self._core.all_cpu_slots()

    def own_memory(self) -> tuple[int, int]:
        """(address, bytes) of all slots; (0, 0) where nothing was loaded, or all lies in a file."""
        return self._core.own_memory()


class ExpertBytes:
    """Packed bytes of one, of some, of all, and what they are."""

    _core: ExpertStore

    @property
    def core(self) -> ExpertStore:
        """The layer in the C++ core."""
        return self._core

    @property
    def tier(self) -> str:
        """The tier whose kernels this layer runs on."""
        return self._core.tier

    @property
    def loaded(self) -> int:
        """How many experts are here."""
        return self._core.loaded

    @property
    def bytes_per_expert(self) -> int:
        """Packed bytes of one expert, padding and scales included."""
        return self._core.bytes_per_expert

    @property
    def in_file(self) -> bool:
        """Whether its experts lie in a mapped file, where they cannot be replaced."""
        return self._core.in_file

    @property
    def in_place(self) -> bool:
        """Whether its experts are used where they were given, and there is no packed copy."""
        return self._core.in_place

    @property
    def formats(self) -> tuple[FormatNames, ...]:
        """Formats of gate and up, and of down; of each, where gate and up have two."""
        gate, up, down = expert_formats(self._core)
        return (gate, down) if gate == up else (gate, up, down)

    @property
    def packed_bytes(self) -> int:
        return len(self.parts()[0])

    def parts(self) -> tuple[memoryview, ...]:
        """Panels of all experts as they lie in memory; valid as long as this object."""
        return expert_bytes(self._core)

    def bytes(self, first: int, count: int) -> list[ByteRange]:
        """Where the experts [first, first + count) lie, for each memory node; in place, of each matrix."""
        return self._core.bytes(first, count)

    def read_next(self, upcoming: list[ByteRange]) -> None:
        """Sets the ranges that idle workers fetch while and after this layer is computed."""
        self._core.read_next(upcoming)

    def layout(self) -> tuple[PanelLayout, PanelLayout]:
        """Layouts of the packed gate_up, and of the down that follows. Panels of gate_up alternate 16 rows of gate and
        16 of up. Raises KernelError where these have two formats, and panels of their own."""
        if len(self.formats) > 2:
            raise KernelError("experts whose gate and up have two formats have no common layout")
        gate_up, down = self._core.layout()
        return gate_up, down

    def packed(self, expert: int) -> Tensor:
        """A copy of one expert's packed bytes, uint8 [bytes_per_expert]."""
        out = torch.empty(self.bytes_per_expert, dtype=torch.uint8)
        self.copy_packed(expert, out)
        return out

    def copy_packed(self, expert: int, out: Tensor) -> None:
        """One expert's packed bytes, on all workers, into uint8 [bytes_per_expert]."""
        self._core.copy_packed(expert, out)

    def copy_all(self, ids: Sequence[int], out: Tensor) -> None:
        """The packed bytes of each, one after the other, on all workers, into uint8 [their bytes]."""
        self._core.copy_all(list(ids), out)

    def load_packed(self, expert: int, packed: Tensor) -> None:
        """The inverse of `packed`."""
        self._core.load_packed(expert, packed)
