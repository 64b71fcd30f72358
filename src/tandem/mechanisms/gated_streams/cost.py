"""Planner costs of gated residual streams."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.gated_streams.shape import GatedStreams


class Cost(cost.Cost[GatedStreams]):
    """Cost of the streams around a block."""

    needs_kernels = False
    kernels = 2
    sums = 0  # every rank has all streams
