"""The tensors that a `StateLayout` describes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tandem.config.state import StateLayout

_STORAGE = {"bfloat16": np.uint16, "float32": np.uint32}


def allocate(layout: StateLayout, pages: int, device: torch.device | None = None) -> list[tuple[Tensor, ...]]:
    """One tuple for each state, a tensor for each of its arrays, zeros. device: None: this process's memory.

    There zeros come from calloc: memory is taken when a page is first used, not at start-up (torch.zeros touches it).
    """
    return [
        tuple(_zeros(layout.page_shape(state, array, pages), _dtype(layout, array.dtype), device)
              for array in state.rows)
        for state in layout.states
    ]  # fmt: skip


def _dtype(layout: StateLayout, name: str) -> str:
    return layout.dtype if name == "act" else name


def _zeros(shape: tuple[int, ...], dtype: str, device: torch.device | None) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if device is not None:
        return torch.zeros(shape, dtype=kind, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=_STORAGE[dtype])).view(kind)
