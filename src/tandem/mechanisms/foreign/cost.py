"""Planner costs of layers in modules that are not ours: nothing that a planner would divide or record."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.foreign.shape import Foreign


class Cost(cost.Cost[Foreign]):
    """Cost of a layer's work outside its experts."""

    needs_kernels = False
