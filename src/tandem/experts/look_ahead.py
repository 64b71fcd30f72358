"""`LookAhead`: a layer's matrices, looked up while the layer before is packed.

Finding a tensor in a checkpoint is Python's work, 20 to 40 us an expert. That is little beside packing it. But all
workers would stand still while a layer's first experts are looked up. And experts found together are packed together.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from time import sleep

import torch
from torch import Tensor

from tandem.formats.codes import Weight

ExpertMatrices = tuple[Weight, Weight, Weight]
"""gate and up [width, hidden], down [hidden, width]."""


def are_views(matrices: ExpertMatrices) -> bool:
    """Whether these are plain bf16 tensors: views of the mapped file, which take no memory. Others must be made."""
    return all(isinstance(w, Tensor) and w.dtype == torch.bfloat16 and w.is_contiguous() for w in matrices)


class LookAhead:
    """Is called as `matrices` is, each expert once. Of what takes memory only the first one is made ahead."""

    def __init__(
        self, count: int, matrices: Callable[[int], ExpertMatrices], after_seconds: float = 0.0
    ) -> None:
        self._count, self._matrices, self._after_seconds = count, matrices, after_seconds
        self._found: dict[int, ExpertMatrices] = {}
        self._needed = 0  # the caller is here: what it has passed is not looked up any more
        self._thread = Thread(target=self._look, name="tandem-look-ahead", daemon=True)
        self._thread.start()

    def __call__(self, expert: int) -> ExpertMatrices:
        self._needed = max(self._needed, expert + 1)
        found = self._found.pop(expert, None)
        return self._matrices(expert) if found is None else found

    def _look(self) -> None:
        """Whatever cannot be read is an error when it is called for."""
        sleep(self._after_seconds)
        for expert in range(self._count):
            if expert < self._needed:
                continue
            try:
                found = self._matrices(expert)
            except Exception:
                return
            self._found[expert] = found
            if not are_views(found):
                return
