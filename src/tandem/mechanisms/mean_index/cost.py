"""Planner costs of an indexer of blocks."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.cost import pairs
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.token_index.cost import SCORE_BYTES
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.rope import Rope

KERNELS = 30  # a block's key, scores, and lists of the best


class Cost(cost.Cost[MeanIndex]):
    """Cost of the scores of all blocks."""

    kernels = KERNELS

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (self.shape.rope,)

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        """Scores, half as much again for the lists of the best of them; turned queries, choices of blocks and of
        tokens."""
        s = self.shape
        return 3 * SCORE_BYTES + step.rows * (2 * s.heads * s.dim + 4 * (s.budget // s.pool + s.most))

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        s = self.shape
        return 2.0 * pairs(rows, before, before + rows) * s.heads * s.dim / s.pool
