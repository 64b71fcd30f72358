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
        """Scores, half as much again for the lists of the best of them; turned queries, and choices."""
        return 3 * SCORE_BYTES + step.rows * (2 * self.shape.heads * self.shape.dim + 4 * self.shape.budget)

    def why_no_gpu(self) -> str:
        if self.shape.pool > 1:
            return "there are no GPU kernels for indexers whose keys stand for several tokens"
        return super().why_no_gpu()
