"""`StepRows`: which token of which sequence each row of a step is, and where its sequence's last rows lie.

Worked out once a step, for all layers. Nothing here waits for a GPU where every sequence has one row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepRows:
    """T rows of S sequences. A ring [slots, R, …] holds the last R rows of a sequence, that of position p at p % R."""

    positions: Tensor  # int64 [T]
    cache_slots: Tensor  # int64 [T]
    sequence: Tensor  # int64 [T]: whose row
    slots: Tensor  # int64 [S]
    copied: Tensor  # int64 [S]: itself, or the last real one, of which it is a copy that fills up a graph
    begins: Tensor  # int64 [S]: the first row of each …
    first: Tensor  # int64 [S]: … and its position
    last: Tensor  # int64 [S]: position of its last row
    tables: Tensor  # int64 [S, P]
    row_per_sequence: bool  # every sequence has one row
    shared: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Indices that all layers of one kind share: made by `make` on the first call with this key."""
        if key not in self.shared:
            self.shared[key] = make()
        indices: T = self.shared[key]
        return indices

    @property
    def static(self) -> bool:
        """Whether shapes must not depend on values: on a GPU, where a step may become a graph."""
        return self.row_per_sequence and self.positions.is_cuda

    def keys_of(self, size: int, count: int) -> Tensor:
        """int64 [T, count]: where `joined` has each row and those before it, newest first. Those before a sequence's
        beginning are the row itself."""
        return self.once(("keys", size, count), lambda: self._keys_of(size, count))

    def _keys_of(self, size: int, count: int) -> Tensor:
        rows, device = len(self.positions), self.positions.device
        positions = self.positions[:, None] - torch.arange(count, device=device)
        first, ring_rows = self.first[self.sequence][:, None], len(self.slots) * size
        new = ring_rows + self.begins[self.sequence][:, None] + positions - first
        keys = torch.where(positions >= first, new, self.sequence[:, None] * size + positions % size)
        return torch.where(positions < 0, ring_rows + torch.arange(rows, device=device)[:, None], keys)

    def joined(self, ring: Tensor, new: Tensor) -> Tensor:
        """[S * R + T, n]: what the rings of all sequences hold, then the new rows."""
        return torch.cat((ring[self.slots].flatten(0, 1), new))

    def taken_in(self, ring: Tensor, new: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`joined`, and `keys_of` so many; the ring takes the new rows in. Rows that are apart may follow each other in
        one ring, so that it must have them before; of a prompt it has no room for all beside those before."""
        if self.row_per_sequence:
            self.keep(ring, new)
        known, at = self.joined(ring, new), self.keys_of(ring.shape[1], count)
        if not self.row_per_sequence:
            self.keep(ring, new)
        return known, at

    def keep(self, ring: Tensor, new: Tensor) -> None:
        """New rows go into the rings of their sequences; those that later ones would overwrite go to nobody's."""
        slots, at = self.once(("places", ring.shape[1]), lambda: self._places(ring.shape[1]))
        ring[slots, at] = new

    def _places(self, size: int) -> tuple[Tensor, Tensor]:
        slots = self.slots[self.sequence]
        if not self.row_per_sequence:
            slots = slots.masked_fill(self.positions + size <= self.last[self.sequence], 0)
        return slots, self.positions % size


class StepContext(Protocol):
    """Rows of a step: none is a draft token, where nothing else is said. The C++ core asks for `batch` alone."""

    @property
    def batch(self) -> KernelBatch: ...

    @property
    def rows(self) -> StepRows: ...


def step_rows(batch: KernelBatch) -> StepRows:
    """Rows that only fill up a graph's batch have slot 0, and are copies of the last one. They get its slot, so that
    they compute and write the same as it does."""
    slots, starts, lens = batch.slots.long(), batch.query_starts.long(), batch.seq_lens.long()
    rows, sequences = len(batch.positions), len(slots)
    each = torch.arange(max(rows, sequences), device=slots.device)
    real = (slots > 0).sum() - 1
    copied = torch.minimum(each[:sequences], real).clamp(min=0)
    return StepRows(
        positions=batch.positions, cache_slots=batch.cache_slots,
        sequence=torch.searchsorted(starts[1:], each[:rows], right=True),
        slots=slots[copied], copied=copied,
        begins=starts[:-1], first=lens - starts.diff(), last=lens - 1, tables=batch.block_tables.long(),
        row_per_sequence=rows == sequences,
    )  # fmt: skip


class BlockRows(NamedTuple):
    """B blocks of n rows that see each other, behind a sequence's last kept token. positions int64 [B * n]; slots and
    last int64 [B]: of its ring, and that token's position."""

    positions: Tensor
    slots: Tensor
    last: Tensor
