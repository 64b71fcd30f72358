"""DRY: tokens that would go on with a repetition become less probable, the longer the repetition is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tandem.engine.protocol import SamplingParams
from tandem.engine.sequence import Sequence

# A repetition counts as no longer than this: by then nothing is left of a token's probability. Without a bound the work
# would grow with the square of a text of one token.
LONGEST = 64
_MOST = 1e4  # of a penalty: float32 must hold the difference

Ids = npt.NDArray[np.int64]


def dry_penalties(sequence: Sequence) -> tuple[Ids, npt.NDArray[np.float32]]:
    """Token ids, each once, and what their logits lose.

    Where the sequence's last n tokens, at least `dry_allowed_length`, stand somewhere before, the token behind that
    place loses multiplier x base^(n - allowed). The longest n of a token counts. A repetition does not reach over
    `dry_breakers`, and such a token itself loses nothing.
    """
    params = sequence.sampling
    tokens = np.asarray(_window(sequence.tokens, params), dtype=np.int64)
    breakers = frozenset(params.dry_breakers)
    lengths = _repeated(tokens, breakers, params.dry_allowed_length)
    lengths = {token: n for token, n in lengths.items() if token not in breakers}
    ids = np.fromiter(lengths, dtype=np.int64, count=len(lengths))
    penalties = [_penalty(n, params) for n in lengths.values()]
    return ids, np.asarray(penalties, dtype=np.float32)


def _window(tokens: list[int], params: SamplingParams) -> list[int]:
    last = params.dry_penalty_last_n
    return tokens if last < 0 else tokens[max(0, len(tokens) - last) :]


def _repeated(tokens: Ids, breakers: frozenset[int], least: int) -> dict[int, int]:
    """By the token behind it, the length of the longest end of `tokens` that stands before: `least` or longer."""
    found: dict[int, int] = {}
    if len(tokens) < 2:
        return found
    ends = np.arange(len(tokens) - 1)  # places where the end of `tokens` may stand, too
    for length in range(1, min(LONGEST, len(tokens) - 1) + 1):
        wanted = int(tokens[-length])
        if wanted in breakers:
            break
        ends = ends[ends - length + 1 >= 0]
        ends = ends[tokens[ends - length + 1] == wanted]
        if not len(ends):
            break
        if length >= least:
            found.update(dict.fromkeys(tokens[ends + 1].tolist(), length))
    return found


def _penalty(length: int, params: SamplingParams) -> float:
    growth = min((length - params.dry_allowed_length) * np.log(params.dry_base), 80.0)
    return min(params.dry_multiplier * float(np.exp(growth)), _MOST)
