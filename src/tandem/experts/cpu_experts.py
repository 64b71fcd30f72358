"""`CpuExperts`: one layer's experts in CPU memory, computed by the packed kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem.formats.codes import Weight
from tandem.kernels.ops import ExpertLayer, Routing, SureRead

ExpertMatrices = tuple[Weight, Weight, Weight]
"""gate and up [width, hidden], down [hidden, width]."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch's pending partial sum."""

    result: Tensor


class CpuExperts:
    """`submit` a batch, do something else, `wait` for its sum.

    On a machine without a GPU there is nothing else to do: the calling thread is a worker of the pool, and `submit`
    returns when the work is done.
    """

    def __init__(self, layer: ExpertLayer) -> None:
        self._layer = layer

    def load(self, count: int, matrices: Callable[[int], ExpertMatrices]) -> None:
        """Packs experts 0 … count - 1, one after the other: never more than one unpacked expert is held."""
        for expert in range(count):
            self._layer.load(expert, *matrices(expert))

    def sure_read(self, experts: int) -> SureRead:
        """The last `experts` of the layer, which every token chooses."""
        return SureRead(self._layer, experts)

    def submit(self, x: Tensor, routing: Routing) -> Ticket:
        """x [T, hidden], routing [T, k]."""
        return Ticket(self._layer.forward(x, routing.ids, routing.weights))

    def wait(self, ticket: Ticket) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        return ticket.result
