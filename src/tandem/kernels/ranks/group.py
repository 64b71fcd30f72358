"""`Group`: the ranks that hold a model together. What they compute apart meets here, after attention and after experts.

Ranks compute the same rows in the same order, so their calls match without a word. Ranks go on from equal bits: else
their routers would choose apart. A CUDA graph may hold a call, so it takes and gives tensors and never looks at them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """One rank's side of it."""

    def sum(self, rows: Tensor) -> Tensor:
        """Summands [T, n], which may be changed -> their sum over all ranks, of the same type, and on all of the same
        bits. It is added in float32 in the order of ranks, then rounded."""
        ...

    def gather(self, columns: Tensor, whole: int) -> Tensor:
        """[T, n], n of this rank -> [T, whole], side by side in their order. The last rank may have fewer."""
        ...
