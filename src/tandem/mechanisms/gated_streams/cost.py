"""Planner costs of gated residual streams."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.spec.gpu_scratch import StepSize


class Cost(cost.Cost[GatedStreams]):
    """Cost of the streams around a block."""

    kernels = 3
    sums = 0  # every rank has all streams

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        """Streams before and after a block, normed and their gates."""
        return step.rows * (4 * 2 * streams * hidden + 2 * 2 * (self.shape.rank + streams))
