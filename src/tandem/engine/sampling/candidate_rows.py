"""`CandidateRows`: the most probable tokens of a step's rows, and the choice among those of many rows at once.

Every number is made as for one row (`on_device.py`), so it is the same choice. NumPy's calls for one row take 20 us.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.narrowing import narrows
from tandem.engine.sampling.penalties import FloatRow, FloatRows
from tandem.engine.sampling.sampler import is_greedy

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
FEW = 3
"""Rows that are looked at one by one: together they would take as long."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """A row's most probable tokens, best first, and what was summed over all of them.

    mass: sum of exp((logit - best) / temperature). norm: logsumexp of the logits. best: the token of the largest logit,
    which need not be the first here if others have the same. drawn: a token of the unfiltered distribution (after
    min_p). Both come with their logits. number: the random one of the choice.
    """

    ids: npt.NDArray[np.int64]
    logits: FloatRow
    mass: float
    norm: float
    best: tuple[int, float]
    drawn: tuple[int, float]
    complete: bool  # these are all tokens
    number: float


class Filters(NamedTuple):
    """Settings that rows must share to be looked at together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    def limits(self, count: int, complete: bool) -> bool:
        """True where top_k leaves out some of all tokens. count, complete: of the candidates."""
        return self.top_k > 0 and not (complete and self.top_k >= count)


def filters_of(params: SamplingSettings) -> Filters | None:
    """None: such a row is looked at alone, as one must be where any other setting narrows the choice."""
    if params.logprobs is not None or is_greedy(params) or narrows(params):
        return None
    return Filters(params.temperature, params.top_k, params.top_p, params.min_p)


@dataclass(frozen=True, slots=True)
class CandidateRows:
    """`Candidates` of rows, an array for each of their fields."""

    ids: npt.NDArray[np.int64]  # [R, C]
    logits: FloatRows  # [R, C]
    sums: Numbers  # [R, 2]: mass, norm
    best: Numbers  # [R, 2]
    drawn: Numbers  # [R, 2]
    numbers: Numbers  # [R]
    complete: bool

    def row(self, row: int) -> Candidates:
        (mass, norm), (best, logit) = self.sums[row].tolist(), self.best[row].tolist()
        drawn, its_logit = self.drawn[row].tolist()
        return Candidates(
            self.ids[row], self.logits[row], mass, norm, (int(best), logit), (int(drawn), its_logit), self.complete,
            float(self.numbers[row]),
        )  # fmt: skip

    def chosen(self, rows: Rows[int], filters: Filters) -> list[int]:
        """Tokens of these rows, which have these settings. -1: a row has to be looked at alone."""
        count = self.ids.shape[1]
        limited = filters.limits(count, self.complete)
        if filters.top_p >= 1.0 and not limited:
            tokens: list[int] = self.drawn[rows, 0].astype(np.int64).tolist()
            return tokens
        if limited and filters.top_k > count:
            return [-1] * len(rows)
        logits = self.logits[rows]
        falling = (logits - logits[:, :1]) * np.float32(1.0 / filters.temperature)
        lengths, known = self._lengths(rows, falling, filters, limited)
        width = int(lengths.max())
        drawn = _inverted(self.ids[rows, :width], falling[:, :width], lengths, self.numbers[rows])
        return [token if sure else -1 for token, sure in zip(drawn.tolist(), known.tolist(), strict=True)]

    def _lengths(
        self, rows: Rows[int], falling: FloatRows, filters: Filters, limited: bool
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """How many first candidates of each pass, and whether that is certain: of equals at its end others might."""
        here = falling.shape[1]
        most = filters.top_k if limited else here
        lengths, certain = np.full(len(rows), most), np.ones(len(rows), dtype=np.bool_)
        if filters.top_p < 1.0:
            weights = np.exp(falling[:, :most])
            sums = weights.sum(axis=1).astype(np.float64) if limited else self.sums[rows, 0]
            below = np.cumsum(weights, axis=1, dtype=np.float64) < (filters.top_p * sums)[:, None]
            reached = below.sum(axis=1) + 1
            certain = np.bool_(limited or self.complete) | (reached <= most)
            lengths = np.minimum(reached, most)
        last = lengths - 1
        behind = np.minimum(lengths, here - 1)
        row = np.arange(len(rows))
        ends = falling[row, last] > falling[row, behind]
        certain &= ends | np.bool_(self.complete) & (lengths == here)
        if filters.min_p > 0.0:
            lengths = np.minimum(lengths, (falling >= math.log(filters.min_p)).sum(axis=1))
        return lengths, certain


def _inverted(ids: Ids, falling: FloatRows, lengths: npt.NDArray[np.intp], numbers: Numbers) -> Ids:
    """As `sampler.invert` of each row's first candidates, by ascending id."""
    absent = np.arange(ids.shape[1]) >= lengths[:, None]
    order = np.argsort(np.where(absent, np.iinfo(np.int64).max, ids), axis=1)
    weights = np.exp(np.take_along_axis(falling, order, axis=1))
    weights[absent] = 0.0
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    total = cumulative[:, -1:]
    place = (cumulative <= numbers[:, None] * total).sum(axis=1)
    rounded = place >= lengths  # up: the last one with any weight
    if rounded.any():
        place = np.where(rounded, (cumulative < total).sum(axis=1), place)
    row = np.arange(len(ids))
    tokens: Ids = ids[row, order[row, place]]
    return tokens
