"""Planner costs of a dense feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm

from tandem.mechanisms import cost
from tandem.mechanisms.cost import Limit
from tandem.mechanisms.dense.shape import Dense
from tandem.spec.stored import StoredFormat, StoredFormats

UNGATED_HALVES = 2  # kernels take the rows of a feed-forward without a gate in two halves


class Cost(cost.Cost[Dense]):
    """Cost of two or three matrices."""

    needs_kernels = False

    @property
    def between_bytes(self) -> int:
        """Products in float32, and what the activation makes of them."""
        return (4 * (self.shape.activation.matrices - 1) + 2) * self.shape.width

    def cut(self, ranks: int) -> Dense:
        return replace(self.shape, width=self.shape.width // ranks)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield width_limit("dense layers", self.shape, stored.dense)


def width_limit(what: str, dense: Dense, stored: StoredFormat) -> Limit:
    rows = 1 if dense.activation.gated else UNGATED_HALVES
    return Limit(f"{dense.width} rows of {what}", dense.width, lcm(rows, stored.unit("down_proj")))
