"""The least time that a decode step can take, and how near measured steps come to it.

Experts on both sides are read at the same time, each as fast as its memory; what else the GPU does is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tandem.planner.forecast.bound import experts_seconds
from tandem.spec.model_config import ModelConfig, past_bytes
from tandem.spec.stored import StoredFormats


def gpu_step_bytes(model: ModelConfig, stored: StoredFormats, batch: int, context: int) -> int:
    """Bytes of GPU memory that a step without routed experts reads or writes. It reads dense weights, and what is kept
    of every token that is looked at. What is kept of every sequence is read and written."""
    slots = 2 * model.state_layout("bfloat16").slot_bytes
    states = batch * (past_bytes(model, "bfloat16", context) + slots)
    return model.dense_bytes("bfloat16", stored, for_gpu=True) + states


def paired_share(bounds: Sequence[float], times: Sequence[float]) -> float:
    """Median of bound / time, each bound with the ceiling that was read beside its time. On a shared host medians of
    each alone may be of different moments."""
    return statistics.median(bound / time for bound, time in zip(bounds, times, strict=True))


class TimedTokens(NamedTuple):
    """Some tokens, one a step: experts they used, in all layers, those on the GPU, seconds, and GB/s of reading DRAM
    afterwards."""

    tokens: int
    used: int
    hits: int
    seconds: float
    dram_gbps: float


class StepCeilings(NamedTuple):
    """Seconds of a step without experts; GB/s of GPU memory."""

    step_seconds: float
    gpu_gbps: float

    def columns(self, turns: Sequence[TimedTokens], expert_bytes: int) -> dict[str, float]:
        """share: of the least possible time, the median of all turns."""
        bounds = [self.bound(turn, expert_bytes) for turn in turns]
        times = [turn.seconds / turn.tokens for turn in turns]
        return {
            "bound_tok_s": round(1 / statistics.median(bounds), 2),
            "share": round(paired_share(bounds, times), 4),
            "dram_gbps": round(statistics.median(turn.dram_gbps for turn in turns), 1),
        }

    def bound(self, turn: TimedTokens, expert_bytes: int) -> float:
        """Seconds of a token, at least."""
        gpu_reads, cpu_reads = turn.hits / turn.tokens, (turn.used - turn.hits) / turn.tokens
        return self.step_seconds + experts_seconds(
            cpu_reads, gpu_reads, expert_bytes, turn.dram_gbps, self.gpu_gbps
        )
