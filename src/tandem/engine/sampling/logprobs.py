"""Natural-log probabilities of tokens under the model's own distribution: before temperature, penalties and filters."""

from __future__ import annotations

import math

import numpy as np

from tandem.engine.protocol import TokenLogprob
from tandem.engine.sampling.penalties import FloatRow, FloatRows
from tandem.engine.sequence import Chunk

_BLOCK = 64  # values per maximum in the search for the largest


def token_logprob(logits: FloatRow, token_id: int, top: int) -> TokenLogprob:
    """Log-probabilities of one row [vocab]: the chosen token's and the `top` most probable tokens' (ties: lower id)."""
    norm = _log_sum_exp(logits)
    best = [(int(i), float(logits[i] - norm)) for i in _largest(logits, top)] if top else []
    return TokenLogprob(token_id, float(logits[token_id] - norm), best)


def score_prompt(chunk: Chunk, logits: FloatRows) -> None:
    """`logits` are the chunk's last rows. The row of prompt position p scores token p + 1; the row of the last
    position scores none, it chooses the answer's first token. Call before the chunk counts as computed."""
    sequence = chunk.sequence
    top = sequence.sampling.prompt_logprobs
    assert top is not None
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(TokenLogprob(sequence.tokens[0], None))
    first = sequence.computed_len + chunk.length - chunk.logits
    for position, row in enumerate(logits, start=first + 1):
        if position < sequence.prompt_len:
            assert position == len(sequence.prompt_logprobs)
            token = sequence.tokens[position]
            piece = sequence.images is not None and sequence.images.rows.is_piece(position)  # which no row predicts
            sequence.prompt_logprobs.append(TokenLogprob(token, None) if piece else token_logprob(row, token, top))


def _log_sum_exp(logits: FloatRow) -> float:
    best = logits.max()
    return float(best) + math.log(float(np.exp(logits - best).sum()))


def _largest(logits: FloatRow, count: int) -> list[int]:
    """Ids of the `count` largest, best first, ties by id."""
    count = min(count, len(logits))
    blocks = np.maximum.reduceat(logits, np.arange(0, len(logits), _BLOCK))
    # The count-th largest block maximum has `count` values above or at it, so everything wanted is there.
    threshold = np.partition(blocks, -count)[-count] if count <= len(blocks) else -np.inf
    ids = np.flatnonzero(logits >= threshold)
    return [int(i) for i in ids[np.argsort(-logits[ids], kind="stable")][:count]]
