"""Natural-log probabilities of tokens under the model's own distribution: before temperature, penalties and filters."""

from __future__ import annotations

import numpy as np

from tandem.engine.penalties import FloatRow
from tandem.engine.protocol import TokenLogprob
from tandem.engine.sequence import Sequence


def token_logprob(logits: FloatRow, token_id: int, top: int) -> TokenLogprob:
    """Of one row [vocab]: the chosen token's log-probability and the `top` most probable tokens' (ties: lower id)."""
    norm = _log_sum_exp(logits)
    best = [(int(i), float(logits[i] - norm)) for i in _largest(logits, top)] if top else []
    return TokenLogprob(token_id, float(logits[token_id] - norm), best)


def score_prompt(sequence: Sequence, first_row: int, logits: FloatRow) -> None:
    """Row r of `logits` is that of prompt position first_row + r and predicts the token after it."""
    top = sequence.sampling.prompt_logprobs
    assert top is not None
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(TokenLogprob(sequence.tokens[0], None))
    for position, row in enumerate(logits, start=first_row + 1):
        if position < sequence.prompt_len:
            assert position == len(sequence.prompt_logprobs)
            sequence.prompt_logprobs.append(token_logprob(row, sequence.tokens[position], top))


def _log_sum_exp(logits: FloatRow) -> float:
    best = logits.max()
    return float(best) + float(np.log(np.exp(logits - best, dtype=np.float32).sum(dtype=np.float64)))


def _largest(logits: FloatRow, count: int) -> list[int]:
    count = min(count, len(logits))
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= threshold)
    return [int(i) for i in ids[np.argsort(-logits[ids], kind="stable")][:count]]
