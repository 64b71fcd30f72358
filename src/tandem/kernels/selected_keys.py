"""`SelectedKeys`: which tokens each row attends to, where not all before it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SelectedKeys(NamedTuple):
    """Cache rows that a step's rows attend to: rows int32 [T, budget], in the order of their positions. The first
    counts int32 [T] of them count; the others are 0."""

    rows: Tensor
    counts: Tensor
