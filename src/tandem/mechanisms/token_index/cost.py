"""Planner costs of an indexer."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.token_index.shape import Index
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.rope import Rope

SCORE_BYTES = 256 << 20  # of scores of tokens that rows may choose; once for graphs, once for other steps
KERNELS = 60  # of one that chooses


class Cost(cost.Cost[Index]):
    """Cost of the scores of all tokens, and of a choice."""

    @property
    def kernels(self) -> int:
        return KERNELS if self.shape.reuse is None else 0

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (self.shape.rope,)

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        """Scores, half as much again for the lists of the best of them; turned queries, and choices. Where keys stand
        for several tokens, the choice of keys and of tokens; keys and gates as they came and as they are kept."""
        s = self.shape
        pooled = 4 * (s.budget // s.pool + s.pool) + 3 * 2 * 2 * s.dim if s.pool > 1 else 0
        return 3 * SCORE_BYTES + step.rows * (2 * s.heads * s.dim + 4 * s.budget + pooled)
