"""Changes to a row of logits that depend on the sequence: penalties, bias, and a minimum length."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.dry import dry_penalties
from tandem.engine.sequence import Sequence

FloatRow = npt.NDArray[np.float32]  # [vocab]
FloatRows = npt.NDArray[np.float32]  # [R, vocab]


def uses_penalties(params: SamplingSettings) -> bool:
    neutral = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.0,
        0.0,
        0.0,
    )
    return not neutral


def adjusts(params: SamplingSettings) -> bool:
    """Whether penalties or a bias change each row."""
    return uses_penalties(params) or params.dry_multiplier > 0.0 or bool(params.logit_bias)


def changes_logits(sequence: Sequence) -> bool:
    return adjusts(sequence.sampling) or sequence.answer_len < sequence.sampling.min_tokens


def adjust(logits: FloatRow, sequence: Sequence, eos_ids: Collection[int]) -> FloatRow:
    """A changed copy of one row. Order as in Transformers: penalties, bias, tokens that may not come yet."""
    row = logits.copy()
    if uses_penalties(sequence.sampling):
        _penalise(row, sequence)
    if sequence.sampling.dry_multiplier > 0.0:
        ids, penalties = dry_penalties(sequence)
        row[ids] -= penalties
    for token_id, addend in sequence.sampling.logit_bias.items():
        row[token_id] += addend
    if sequence.answer_len < sequence.sampling.min_tokens:
        row[[i for i in (*eos_ids, *sequence.sampling.stop_token_ids) if i < len(row)]] = -np.inf
    return row


def _penalise(row: FloatRow, sequence: Sequence) -> None:
    """Repetition (CTRL, arXiv 1909.05858) over prompt and answer; presence and frequency (OpenAI) over the answer."""
    counts = _token_counts(sequence)
    ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    times = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
    params, values = sequence.sampling, row[ids]
    factor = np.float32(params.repetition_penalty)
    values = np.where(values > 0, values / factor, values * factor)
    values -= np.float32(params.presence_penalty) * (times > 0) + np.float32(params.frequency_penalty) * times
    row[ids] = values


def _token_counts(sequence: Sequence) -> dict[int, int]:
    """Token id -> times in the answer, prompt tokens included with 0. Kept up to date by `Sequence.append`."""
    if sequence.token_counts is None:
        counts = dict.fromkeys(sequence.tokens[: sequence.prompt_len], 0)
        for token_id in sequence.tokens[sequence.prompt_len :]:
            counts[token_id] = counts.get(token_id, 0) + 1
        sequence.token_counts = counts
    return sequence.token_counts
