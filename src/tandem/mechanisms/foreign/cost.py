"""What layers of modules that are not ours take: nothing that a planner would divide or record."""

from __future__ import annotations

from tandem.mechanisms import cost
from tandem.mechanisms.foreign.shape import Foreign


class Cost(cost.Cost[Foreign]):
    """Of what a layer does outside its experts."""

    needs_kernels = False
