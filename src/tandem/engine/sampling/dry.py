"""DRY: tokens that would go on with a repetition become less probable, the longer the repetition is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.repetitions import Repetitions
from tandem.engine.sequence import Sequence

# A repetition counts as no longer than this: by then nothing is left of a token's probability.
LONGEST = 64
_LENGTH_BITS = LONGEST.bit_length()
_MOST = 1e4  # of a penalty: float32 must hold the difference

Ids = npt.NDArray[np.int64]


def dry_penalties(sequence: Sequence) -> tuple[Ids, npt.NDArray[np.float32]]:
    """Token ids, each once, and what their logits lose.

    Where the sequence's last n tokens, at least `dry_allowed_length`, stand somewhere before, the token behind that
    place loses multiplier x base^(n - allowed). The longest n of a token counts. A repetition does not reach over
    `dry_breakers`, and such a token itself loses nothing.
    """
    params, known = sequence.sampling, _repetitions(sequence)
    places, lengths = _in_window(known, params.dry_penalty_last_n)
    long = lengths >= params.dry_allowed_length
    ids, lengths = _longest(known.behind(places[long]), lengths[long])
    loses = ~np.isin(ids, params.dry_breakers)
    return ids[loses], _penalties(lengths[loses], params)


def _repetitions(sequence: Sequence) -> Repetitions:
    if sequence.repetitions is None:
        sequence.repetitions = Repetitions(LONGEST, sequence.sampling.dry_breakers)
    sequence.repetitions.extend(sequence.tokens[sequence.repetitions.size :])
    return sequence.repetitions


def _in_window(known: Repetitions, last: int) -> tuple[Ids, Ids]:
    """As if there were nothing before the last so many tokens; -1: all."""
    start = 0 if last < 0 else max(0, known.size - last)
    first = np.searchsorted(known.places, start)
    places = known.places[first:]
    return places, np.minimum(known.lengths[first:], places - start + 1)


def _longest(ids: Ids, lengths: Ids) -> tuple[Ids, Ids]:
    """Each id once, with the greatest of its lengths."""
    keys = np.sort(ids << _LENGTH_BITS | lengths)
    ids, lengths = keys >> _LENGTH_BITS, keys & ((1 << _LENGTH_BITS) - 1)
    last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
    return ids[last], lengths[last]


def _penalties(lengths: Ids, params: SamplingSettings) -> npt.NDArray[np.float32]:
    growth = np.minimum((lengths - params.dry_allowed_length) * np.log(params.dry_base), 80.0)
    penalties: npt.NDArray[np.float32] = np.minimum(params.dry_multiplier * np.exp(growth), _MOST).astype(
        np.float32
    )
    return penalties
