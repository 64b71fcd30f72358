"""`OneExpert`: a dense MLP where its fastest form is a layer of one expert that every row chooses (on a CPU)."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.formats.codes import Weight
from tandem.kernels.ops import ExpertMatrices, Routing, SureRead

KEPT_ROWS = 256  # more than any recorded step has


class OneExpert:
    """`MLP` over an `ExpertMatrices` of one."""

    def __init__(self, layer: ExpertMatrices) -> None:
        self.packed, self._everyone = layer, _everyone(KEPT_ROWS)

    def load(self, gate: Weight, up: Weight, down: Weight) -> None:
        self.packed.load_all(0, [(gate, up, down)])

    def reads(self) -> list[SureRead]:
        return [SureRead(self.packed, 1)]

    def __call__(self, x: Tensor) -> Tensor:
        # The kept ones are never replaced: recorded steps go on reading them.
        ids, weights, _ = self._everyone if len(x) <= KEPT_ROWS else _everyone(len(x))
        return self.packed.forward(x, ids[: len(x)], weights[: len(x)])


def _everyone(rows: int) -> Routing:
    """All rows choose expert 0 with weight 1."""
    return Routing(torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1))
