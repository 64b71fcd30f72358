"""What happens to a layer's `Routing` between the router and the experts."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.ops import Routing


def with_shared(routing: Routing, first: int, count: int, weight: Tensor | None) -> Routing:
    """Appends the shared experts, ids first … first + count - 1, to every token's choice.

    Their weight is `weight` [T, 1] (a shared-expert gate), or 1.
    """
    rows = len(routing.ids)
    ids = torch.arange(first, first + count, dtype=torch.int32).expand(rows, count)
    if weight is None:
        weight = routing.weights.new_ones(1, 1)
    return Routing(
        torch.cat((routing.ids, ids), dim=1),
        torch.cat((routing.weights, weight.float().expand(rows, count)), dim=1),
    )
