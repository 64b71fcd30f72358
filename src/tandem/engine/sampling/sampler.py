"""Chooses one token per row of logits. Row by row, so that a result never depends on what else is in the batch."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.engine.protocol import SamplingSettings, TokenLogprob
from tandem.engine.sampling.logprobs import token_logprob
from tandem.engine.sampling.masks import RowMasks, TokenMask, without_forbidden
from tandem.engine.sampling.narrowing import narrowed, narrows
from tandem.engine.sampling.penalties import FloatRow, FloatRows, adjust, changes_logits
from tandem.engine.sequence import Sequence

# A nucleus or top-k set nearly always lies within a few nats of the best token: sorting those few is much cheaper than
# sorting the vocabulary. Tried in this order until the set is complete; the result does not depend on it.
_NEAR_TOP_NATS = (3.0, 6.0, 10.0, math.inf)
# Cumulative sums of a whole row go over blocks first: 15x less to add up one by one in double precision.
_BLOCK = 256
# Below this the division by the temperature leaves float32's range; the choice is the best token anyway.
_GREEDY_BELOW = 1e-5


class Sampled(NamedTuple):
    """token_id -1: the row had no finite maximum (NaN or infinite logits), nothing could be chosen."""

    token_id: int
    logprob: TokenLogprob | None


def fresh_seed() -> int:
    """For requests that name none."""
    return int.from_bytes(os.urandom(8), "little")


def uniform(seed: int, index: int, position: int, purpose: bytes = b"") -> float:
    """The random number in [0, 1) for one token: a hash of what names the token, so a counter-based generator without
    state (cf. Salmon et al., SC11). It is the same in any batch, after preemption, and on any machine. Numbers for
    another purpose are others."""
    name = struct.pack("<QIQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index, position)
    word = int.from_bytes(hashlib.blake2b(name, digest_size=8, person=purpose).digest(), "little")
    return (word >> 11) * 2.0**-53


def number_of(sequence: Sequence) -> float:
    """For the choice of its next token."""
    return uniform(sequence.seed, sequence.index, sequence.total_len)


def coin_of(sequence: Sequence) -> float:
    """Uniform draw in [0, 1) that decides if XTC acts on its next token; 1 where XTC is off."""
    if sequence.sampling.xtc_probability <= 0.0:
        return 1.0
    return uniform(sequence.seed, sequence.index, sequence.total_len, b"xtc")


def best_token(token_id: float, logit: float) -> Sampled:
    """Sampled token of a row, from a row of `logits.best_of`; token -1 where the logit is not finite."""
    return Sampled(int(token_id), None) if math.isfinite(logit) else Sampled(-1, None)


def is_greedy(params: SamplingSettings) -> bool:
    return params.temperature < _GREEDY_BELOW or params.top_k == 1


def sample(
    logits: FloatRows, sequences: Rows[Sequence], eos_ids: Collection[int], masks: RowMasks = ()
) -> list[Sampled]:
    """logits [R, vocab]; row r belongs to sequences[r], and masks[r] limits it. No masks: nothing does.

    Log-probabilities are those of the unmodified logits.
    """
    masks = masks or [None] * len(sequences)
    best = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(best)), best])  # argmax lands on a NaN if there is one
    return [
        _sample_row(row, int(top), sequence, eos_ids, mask) if ok else Sampled(-1, None)
        for row, top, ok, sequence, mask in zip(logits, best, finite, sequences, masks, strict=True)
    ]


def _sample_row(
    logits: FloatRow, best: int, sequence: Sequence, eos_ids: Collection[int], mask: TokenMask | None
) -> Sampled:
    params = sequence.sampling
    row = adjust(logits, sequence, eos_ids) if changes_logits(sequence) else logits
    if mask is not None:
        row = without_forbidden(row, mask)
    if row is not logits:
        best = int(row.argmax())
        if not np.isfinite(row[best]):
            return Sampled(-1, None)
    if is_greedy(params):
        token_id = best
    else:
        token_id = draw(row, params, number_of(sequence), row[best], coin_of(sequence))
    logprob = None if params.logprobs is None else token_logprob(logits, token_id, params.logprobs)
    return Sampled(token_id, logprob)


def draw(row: FloatRow, params: SamplingSettings, u: float, best: np.float32, coin: float = 1.0) -> int:
    """Inverse of the distribution function at u. Filters act in Transformers' order: temperature, top_k, top_p over
    what top_k left, min_p, typical_p; then XTC. What is left is laid out by id."""
    scaled = row - best
    scaled *= np.float32(1.0 / params.temperature)
    ids = _kept_ids(scaled, params)
    if narrows(params):
        ids = np.arange(len(scaled)) if ids is None else ids
        ids = ids[narrowed(scaled[ids], params, coin)]
    if ids is None:
        return _invert_in_blocks(np.exp(scaled, out=scaled), u)
    return int(ids[invert(np.exp(scaled[ids]), u)])


def invert(weights: FloatRow, u: float) -> int:
    """First place whose cumulative weight exceeds u times the total."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    return _place(cumulative, u * float(cumulative[-1]))


def _place(cumulative: npt.NDArray[np.float64], target: float) -> int:
    place = int(np.searchsorted(cumulative, target, side="right"))
    if place < len(cumulative):
        return place
    return int(
        np.searchsorted(cumulative, cumulative[-1], side="left")
    )  # rounding: the last one with any weight


def _invert_in_blocks(weights: FloatRow, u: float) -> int:
    """`invert`, first to a block, then inside it."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
    cumulative = np.cumsum(sums, dtype=np.float64)
    target = u * float(cumulative[-1])
    block = _place(cumulative, target)
    before = float(cumulative[block - 1]) if block else 0.0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + _place(inside, target - before)


def _kept_ids(scaled: FloatRow, params: SamplingSettings) -> npt.NDArray[np.intp] | None:
    """Ids that pass the filters, ascending; None: all of them. `scaled` has its maximum at 0."""
    limit = params.top_k if 0 < params.top_k < len(scaled) else len(scaled)
    if limit == len(scaled) and params.top_p >= 1.0:
        return None if params.min_p <= 0.0 else _above(scaled, math.log(params.min_p))
    ids = _truncated(scaled, limit, params.top_p)
    return ids if params.min_p <= 0.0 else ids[scaled[ids] >= math.log(params.min_p)]


def _truncated(scaled: FloatRow, limit: int, top_p: float) -> npt.NDArray[np.intp]:
    """top_k, then top_p. Only values are sorted: that is many times faster than sorting ids by them."""
    if limit < len(scaled):
        ids = next(ids for ids in _near(scaled) if len(ids) >= limit)
        falling = _falling(scaled[ids])[:limit]
        mass = top_p * float(np.exp(falling).sum())
    else:
        mass = top_p * float(np.exp(scaled).sum())
        ids = next(
            ids
            for ids in _near(scaled)
            if len(ids) == len(scaled) or float(np.exp(scaled[ids]).sum()) >= mass
        )
        falling = _falling(scaled[ids])
    count = len(falling)
    if top_p < 1.0:  # the token that reaches top_p is in
        cumulative = np.cumsum(np.exp(falling), dtype=np.float64)
        count = min(count, int(np.searchsorted(cumulative, mass, side="left")) + 1)
    return ids[largest(scaled[ids], count, falling[count - 1])]


def largest(values: FloatRow, count: int, smallest: np.float32) -> npt.NDArray[np.intp]:
    """Places of the `count` largest, ascending, `smallest` being the last of these; of equals, the first."""
    places = np.flatnonzero(values >= smallest)
    if len(places) == count:
        return places
    above, equal = np.flatnonzero(values > smallest), np.flatnonzero(values == smallest)
    return np.sort(np.concatenate((above, equal[: count - len(above)])))


def _near(scaled: FloatRow) -> Iterator[npt.NDArray[np.intp]]:
    """Growing sets of the most probable ids; the last one is all of them."""
    return (_above(scaled, -nats) for nats in _NEAR_TOP_NATS)


def _above(scaled: FloatRow, threshold: float) -> npt.NDArray[np.intp]:
    return np.flatnonzero(scaled >= threshold)


def _falling(values: FloatRow) -> FloatRow:
    return np.sort(values)[::-1]
