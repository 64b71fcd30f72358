"""Planner costs of hyper-connections."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.streams.shape import Hyper


class Cost(cost.Cost[Hyper]):
    """Cost of the streams around a block. Scratch of its rows is counted by the mechanisms that have it
    (`SharedKv`)."""

    kernels = 2
    sums = 0  # every rank mixes all streams
