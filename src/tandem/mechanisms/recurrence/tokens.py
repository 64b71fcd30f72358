"""`RecurrentTokens`: what a recurrence is given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RecurrentTokens(NamedTuple):
    """T rows through H heads, in groups that share what is written and asked; float32."""

    queries: Tensor  # [T, G, K]
    written: Tensor  # [T, G, K]
    values: Tensor  # [T, H, V]
    decay: Tensor  # [T, H, 1], or [T, H, K]: the logarithm of what the memory is multiplied with
    beta: Tensor | None = None  # [T, H]: how far what the memory answers at the written key is taken away first
