"""Planner costs of hyper-connections."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.streams.shape import Hyper
from tandem.spec.gpu_scratch import StepSize


class Cost(cost.Cost[Hyper]):
    """Cost of the streams around a block."""

    kernels = 2
    sums = 0  # every rank mixes all streams

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        """Streams before and after a block, and three times in float32 while they mix."""
        return step.rows * (2 * 2 + 3 * 4) * streams * hidden
