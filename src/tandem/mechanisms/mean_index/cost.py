"""Planner costs of an indexer of blocks."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.cost import pairs
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.spec.rope import Rope


class Cost(cost.Cost[MeanIndex]):
    """Cost of the scores of all blocks."""

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (self.shape.rope,)

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        s = self.shape
        return 2.0 * pairs(rows, before, before + rows) * s.heads * s.dim / s.pool

    def why_no_gpu(self) -> str:
        return "there are no GPU kernels for grouped-query attention that chooses tokens"
