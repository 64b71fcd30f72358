"""The tensors that a `StateLayout` describes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.spec.state import Array, Pages, State, StateLayout


class SlotMemory(Protocol):
    """Slots of sequences, by their numbers: each can be copied into another."""

    def __len__(self) -> int: ...

    def __getitem__(self, slot: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class StateArrays:
    """arrays: for each state a tensor for each of its arrays; slots: uint8 [slots, bytes], all of a sequence's in one
    row, so that a snapshot is one copy. Page arrays are [pages, rows, …], slot arrays [slots, …] with a stride."""

    arrays: list[tuple[Tensor, ...]]
    slots: SlotMemory


def allocate(
    layout: StateLayout, pages: int, device: torch.device | None = None, slots: int = 0, window_pages: int = 0
) -> StateArrays:
    """Zeros. device: None: this process's memory, from calloc: it is taken when a page is first used, not at start-up
    (torch.zeros touches it). slots: of which slot 0 is nobody's. window_pages: of layers that see a window; 0: as many
    as of the others."""
    memory = _zeros(slots * layout.slot_bytes, device).view(slots, layout.slot_bytes)
    parts, counts = _parts(layout, memory), (pages, window_pages or pages)
    return StateArrays([_of_state(layout, s, counts, device, parts) for s in layout.states], memory)


def _of_state(
    layout: StateLayout, state: State, counts: tuple[int, int], device: torch.device | None, parts: Iterator[Tensor]
) -> tuple[Tensor, ...]:
    """counts: pages of all tokens, and of windows."""
    if isinstance(state, Pages):
        pages = counts[1] if state.window else counts[0]
        return tuple(_page_array(layout, state, array, pages, device) for array in state.rows)
    return tuple(_slot_array(layout, array, next(parts)) for array in state.slot_arrays(layout.draft_tokens))


def _page_array(
    layout: StateLayout, state: Pages, array: Array, pages: int, device: torch.device | None
) -> Tensor:
    shape, dtype = layout.page_shape(state, array, pages), _dtype(layout, array)
    return _zeros(prod(shape) * dtype.itemsize, device).view(dtype).view(shape)


def _slot_array(layout: StateLayout, array: Array, part: Tensor) -> Tensor:
    dtype = _dtype(layout, array)
    held = part[:, : prod(array.shape) * dtype.itemsize].view(dtype)
    return held.view(len(held), *array.shape)


def _parts(layout: StateLayout, memory: Tensor) -> Iterator[Tensor]:
    """The slots' bytes, array by array."""
    sizes = layout.slot_sizes()
    return iter(memory.split(sizes, dim=1) if sizes else ())


def _dtype(layout: StateLayout, array: Array) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, layout.dtype if array.dtype == "act" else array.dtype)
    return dtype


def _zeros(nbytes: int, device: torch.device | None) -> Tensor:
    if device is not None or not nbytes:  # NumPy's empty arrays have a stride of 0, which older PyTorch does not view
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
