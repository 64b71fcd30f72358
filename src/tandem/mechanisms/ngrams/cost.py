"""Planner costs of n-grams: every rank computes the same, whole."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.stored import RowTable


class Cost(cost.Cost[Ngram]):
    """Beside its matrices and its table nothing."""

    kernels = 8
    sums = 0

    @property
    def tables(self) -> tuple[RowTable, ...]:
        return (self.shape.table,)

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        """Rows of a step as they are stored, in float32 and in bfloat16; keys and values; what streams are given, and
        what the convolution takes."""
        s = self.shape
        return step.rows * ((2 + 4 + 2) * s.width + 2 * (s.channels + s.hidden) + 2 * 2 * s.channels)
