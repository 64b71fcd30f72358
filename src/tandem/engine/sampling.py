"""Chooses one token per row of logits. Row by row, so that a result never depends on what else is in the batch."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Collection
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.engine.logprobs import token_logprob
from tandem.engine.penalties import FloatRow, FloatRows, adjust, changes_logits
from tandem.engine.protocol import SamplingParams, TokenLogprob
from tandem.engine.sequence import Sequence

# A nucleus or top-k set nearly always lies within this many nats of the best token: sorting those few is ~20x
# cheaper than sorting the vocabulary. If it does not, the whole row is sorted; the result is the same.
_NEAR_TOP_NATS = 10.0
# Below this the division by the temperature leaves float32's range; the choice is the best token anyway.
_GREEDY_BELOW = 1e-5


class Sampled(NamedTuple):
    """token_id -1: the row had no finite maximum (NaN or infinite logits), nothing could be chosen."""

    token_id: int
    logprob: TokenLogprob | None


def fresh_seed() -> int:
    """For requests that name none."""
    return int.from_bytes(os.urandom(8), "little")


def uniform(seed: int, index: int, position: int) -> float:
    """The random number in [0, 1) for one token: a hash of what names the token, so a counter-based generator without
    state (cf. Salmon et al., SC11). It is the same in any batch, after preemption, and on any machine."""
    name = struct.pack("<QIQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index, position)
    word = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return (word >> 11) * 2.0**-53


def sample(logits: FloatRows, sequences: Rows[Sequence], eos_ids: Collection[int]) -> list[Sampled]:
    """logits [R, vocab], row r belongs to sequences[r]. Log-probabilities are those of the unmodified logits."""
    best = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(best)), best])  # argmax lands on a NaN if there is one
    return [
        _sample_row(row, int(top), sequence, eos_ids) if ok else Sampled(-1, None)
        for row, top, ok, sequence in zip(logits, best, finite, sequences, strict=True)
    ]


def _sample_row(logits: FloatRow, best: int, sequence: Sequence, eos_ids: Collection[int]) -> Sampled:
    params = sequence.sampling
    row = logits
    if changes_logits(sequence):
        row = adjust(logits, sequence, eos_ids)
        best = int(row.argmax())
    if params.temperature < _GREEDY_BELOW or params.top_k == 1:
        token_id = best
    else:
        token_id = draw(row, params, uniform(sequence.seed, sequence.index, sequence.total_len), row[best])
    logprob = None if params.logprobs is None else token_logprob(logits, token_id, params.logprobs)
    return Sampled(token_id, logprob)


def draw(row: FloatRow, params: SamplingParams, u: float, best: np.float32) -> int:
    """Inverse of the distribution function at u. Filters act in Transformers' order: temperature, top_k, top_p over
    what top_k left, min_p. Filtered rows are laid out by falling probability (ties: by id), others by id."""
    scaled = (row - best) / np.float32(params.temperature)
    ids = _kept_ids(scaled, params)
    weights = np.exp(scaled if ids is None else scaled[ids], dtype=np.float32)
    cumulative = np.cumsum(weights, dtype=np.float64)
    total = cumulative[-1]
    place = int(np.searchsorted(cumulative, u * total, side="right"))
    if place == len(cumulative):  # u * total was rounded up to total: the last token that has any weight
        place = int(np.searchsorted(cumulative, total, side="left"))
    return place if ids is None else int(ids[place])


def _kept_ids(scaled: FloatRow, params: SamplingParams) -> npt.NDArray[np.intp] | None:
    """Ids that pass the filters, most probable first; None: all of them. `scaled` has its maximum at 0."""
    limit = params.top_k if params.top_k > 0 else len(scaled)
    if limit >= len(scaled) and params.top_p >= 1.0:
        if params.min_p <= 0.0:
            return None
        return _sorted_above(scaled, math.log(params.min_p))
    near = _sorted_above(scaled, -_NEAR_TOP_NATS)
    kept = _truncated(scaled, near, limit, params.top_p)
    if kept is None:
        near = _sorted_above(scaled, -np.inf)
        kept = _truncated(scaled, near, limit, params.top_p)
        assert kept is not None
    return kept if params.min_p <= 0.0 else kept[scaled[kept] >= math.log(params.min_p)]


def _sorted_above(scaled: FloatRow, threshold: float) -> npt.NDArray[np.intp]:
    ids = np.flatnonzero(scaled >= threshold)
    return ids[np.argsort(-scaled[ids], kind="stable")]


def _truncated(
    scaled: FloatRow, ids: npt.NDArray[np.intp], limit: int, top_p: float
) -> npt.NDArray[np.intp] | None:
    """top_k then top_p on the candidates `ids`, the most probable tokens in order. None: the answer needs more."""
    if len(ids) < limit < len(scaled):
        return None
    ids = ids[:limit]
    if top_p >= 1.0:
        return ids
    whole = scaled[ids] if limit < len(scaled) else scaled
    mass = float(np.exp(whole, dtype=np.float32).sum(dtype=np.float64)) * top_p
    before = np.cumsum(np.exp(scaled[ids], dtype=np.float32), dtype=np.float64)
    keep = int(np.searchsorted(before, mass, side="left")) + 1  # the token that reaches top_p is in
    complete = len(ids) in (limit, len(scaled))
    return ids[:keep] if complete or keep <= len(ids) else None
