"""Chooses tokens from logits on a GPU.

The GPU computes what needs the whole vocabulary. The choice itself, among a row's most probable tokens, is made here by
the rules and random numbers of `sampler.py`. So it is the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.protocol import SamplingSettings, TokenLogprob
from tandem.engine.sampling.candidate_rows import FEW, CandidateRows, Candidates, Filters, filters_of
from tandem.engine.sampling.narrowing import narrowed, narrows
from tandem.engine.sampling.penalties import FloatRow
from tandem.engine.sampling.sampler import Sampled, best_token, coin_of, invert, is_greedy, largest, number_of
from tandem.engine.sequence import Sequence

# Of a row: more than any usual top_k and nearly every nucleus. A row that needs more is fetched whole.
CANDIDATES = 256

LogitsOf = Callable[[list[int]], Tensor]
"""float32 [n, vocab] on a device: the logits of n rows. To pick them takes longer than to choose a row's best."""


def choose(
    logits_of: LogitsOf, best: npt.NDArray[np.float64], sequences: Rows[Sequence]
) -> list[Sampled | None]:
    """best [R, 2] as `logits.best_of` makes it; row r belongs to sequences[r], whose logits nothing changes. None: the
    candidates do not decide, the whole row must be looked at."""
    chosen: list[Sampled | None] = [best_token(token_id, value) for token_id, value in best.tolist()]
    rows = [r for r, s in enumerate(sequences) if needs_more(s.sampling) and math.isfinite(best[r, 1])]
    if rows:
        some = [sequences[r] for r in rows]
        for r, sampled in zip(rows, _chosen_rows(_candidates(logits_of(rows), best[rows], some), some), strict=True):
            chosen[r] = sampled
    return chosen


def _chosen_rows(candidates: CandidateRows, sequences: Rows[Sequence]) -> list[Sampled | None]:
    """Rows of the same settings together, as far as that decides them."""
    alike: dict[Filters | None, list[int]] = {}
    for r, sequence in enumerate(sequences):
        alike.setdefault(filters_of(sequence.sampling), []).append(r)
    tokens = [-1] * len(sequences)
    for filters, rows in alike.items():
        if filters is not None and len(rows) > FEW:
            for r, token_id in zip(rows, candidates.chosen(rows, filters), strict=True):
                tokens[r] = token_id
    return [
        _chosen(candidates.row(r), sequence) if token_id < 0 else Sampled(token_id, None)
        for r, (token_id, sequence) in enumerate(zip(tokens, sequences, strict=True))
    ]


def needs_more(params: SamplingSettings) -> bool:
    """Than a row's best."""
    return params.logprobs is not None or not is_greedy(params)


def _candidates(logits: Tensor, best: npt.NDArray[np.float64], sequences: Rows[Sequence]) -> CandidateRows:
    count, vocab = min(CANDIDATES, logits.shape[1]), logits.shape[1]
    numbers = np.array([_numbers(s) for s in sequences], dtype=np.float64)
    fetched = _fetched(logits, best, numbers, count)
    ids, values = fetched[:, 4 : 4 + count].astype(np.int64), fetched[:, 4 + count :].astype(np.float32)
    return CandidateRows(ids, values, fetched[:, :2], best, fetched[:, 2:4], numbers[:, 2], count == vocab)


def _fetched(
    logits: Tensor, best: npt.NDArray[np.float64], numbers: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.float64]:
    """[R, 4 + 2 count]: mass, norm, the drawn token, its logit, ids and logits of the most probable. One pass over the
    rows on the device, one copy back."""
    inverse, least, u = torch.from_numpy(numbers).to(logits.device).unbind(1)
    scaled = (logits - torch.from_numpy(best[:, 1:]).to(logits)) * inverse.float()[:, None]
    weights = scaled.exp()
    mass, norm = weights.sum(1, dtype=torch.float64), _norms(logits)
    draws = _drawn(torch.where(scaled >= least.float()[:, None], weights, 0), u)
    top = logits.topk(count)
    columns = (mass[:, None], norm[:, None], draws, logits.gather(1, draws), top.indices, top.values)
    fetched: npt.NDArray[np.float64] = torch.cat([column.double() for column in columns], 1).cpu().numpy()
    return fetched


def _norms(logits: Tensor) -> Tensor:
    """float64 [R]; a row's does not depend on the others."""
    if logits.is_cuda:
        from tandem.kernels.gpu import best  # Triton is there only where a GPU is used

        return best.norms_of(logits)
    return torch.cat([row.double().logsumexp(1) for row in logits.split(1)])


def _numbers(sequence: Sequence) -> tuple[float, float, float]:
    """1 / temperature, log(min_p), and the row's random number. A greedy row is here for its log-probabilities only."""
    params = sequence.sampling
    temperature = 1.0 if is_greedy(params) else params.temperature
    least = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return 1.0 / temperature, least, number_of(sequence)


def _drawn(weights: Tensor, u: Tensor) -> Tensor:
    """int64 [R, 1]: the first id whose cumulative weight exceeds u times the total."""
    cumulative = weights.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    ids = torch.searchsorted(cumulative, u[:, None] * total, right=True)
    return torch.minimum(
        ids, torch.searchsorted(cumulative, total)
    )  # rounding: the last one with any weight


def _chosen(row: Candidates, sequence: Sequence) -> Sampled | None:
    params = sequence.sampling
    token_id: int | None = row.best[0]
    if not is_greedy(params):
        token_id = row.drawn[0] if _unfiltered(params, row) else _among(row, sequence)
    if token_id is None:
        return None
    if params.logprobs is None:
        return Sampled(token_id, None)
    logprob = _logprob(row, token_id, params.logprobs)
    return None if logprob is None else Sampled(token_id, logprob)


def _unfiltered(params: SamplingSettings, row: Candidates) -> bool:
    """Nothing but min_p, which `drawn` has taken into account."""
    limited = params.top_k > 0 and not (row.complete and params.top_k >= len(row.ids))
    return params.top_p >= 1.0 and not narrows(params) and not limited


def _among(row: Candidates, sequence: Sequence) -> int | None:
    """As `sampler.draw`: the filters, then the inverse of the distribution function, by ids."""
    params = sequence.sampling
    falling = (row.logits - row.logits[0]) * np.float32(1.0 / params.temperature)
    count = _prefix_length(row, params, falling)
    if count is None:
        return None
    order = np.argsort(row.ids)
    values = falling[order]
    places = order[largest(values, count, falling[count - 1])]
    if params.min_p > 0.0:
        places = places[falling[places] >= math.log(params.min_p)]
    if narrows(params):
        places = places[narrowed(falling[places], params, coin_of(sequence))]
    return int(row.ids[places[invert(np.exp(falling[places]), row.number)]])


def _prefix_length(row: Candidates, params: SamplingSettings, falling: FloatRow) -> int | None:
    """How many of the most probable pass top_k and top_p; None: more than there are here, or as probable as others."""
    limited = params.top_k > 0 and not (row.complete and params.top_k >= len(falling))
    if limited and params.top_k > len(falling):
        return None
    count = params.top_k if limited else len(falling)
    if params.top_p < 1.0:
        weights = np.exp(falling[:count])
        mass = params.top_p * (float(weights.sum()) if limited else row.mass)
        reached = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), mass, side="left")) + 1
        if reached > count and not limited and not row.complete:
            return None
        count = min(count, reached)
    elif not (limited or row.complete) and params.min_p > 0.0:
        count = int((falling >= math.log(params.min_p)).sum())
    return count if row.complete or falling[count - 1] > falling[-1] else None


def _logprob(row: Candidates, token_id: int, top: int) -> TokenLogprob | None:
    """None: as probable as the last of the `top` are others that are not here; of equals, the lowest ids count."""
    order = np.lexsort((row.ids, -row.logits))[:top]
    if top and not row.complete and row.logits[order[-1]] == row.logits[-1]:
        return None
    best = [(int(row.ids[i]), float(row.logits[i] - row.norm)) for i in order]
    return TokenLogprob(token_id, _logit(row, token_id) - row.norm, best)


def _logit(row: Candidates, token_id: int) -> float:
    for known, logit in (row.best, row.drawn):
        if token_id == known:
            return logit
    return float(row.logits[int(np.flatnonzero(row.ids == token_id)[0])])
