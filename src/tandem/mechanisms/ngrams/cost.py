"""Planner costs of n-grams: every rank computes the same, whole."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.spec.stored import RowTable


class Cost(cost.Cost[Ngram]):
    """Beside its matrices and its table nothing."""

    sums = 0

    @property
    def tables(self) -> tuple[RowTable, ...]:
        return (self.shape.table,)

    def why_no_gpu(self) -> str:
        return "there are no GPU kernels for n-grams out of a table"
