"""`Chosen`: which tokens each row attends to, where not all before it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Chosen(NamedTuple):
    """What rows attend to: rows int32 [T, budget] of the cache, in the order of their positions, of which the first
    counts int32 [T] count; the others are 0."""

    rows: Tensor
    counts: Tensor
