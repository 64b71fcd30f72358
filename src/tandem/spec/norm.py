"""Root mean square norms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm. plus_one: w is stored, and 1 + w multiplies, before anything is rounded. wide: so does w
    itself."""

    eps: float
    plus_one: bool = False
    wide: bool = False
