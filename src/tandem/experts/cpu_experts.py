"""`CpuExperts`: one layer's experts in CPU memory, computed by the packed kernels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tandem.formats.codes import Weight
from tandem.formats.cut import weight_bytes
from tandem.kernels.ops import ExpertLayer, Routing, SureRead

CHUNK_BYTES = 128 << 20  # of weights prepared ahead: milliseconds of packing, more than views take to make

ExpertMatrices = tuple[Weight, Weight, Weight]
"""gate and up [width, hidden], down [hidden, width]."""


class Experts(Protocol):
    """A layer's experts, wherever they live."""

    def load(self, count: int, matrices: Callable[[int], ExpertMatrices]) -> None:
        """Packs experts 0 ... count - 1, one after the other: never more than one unpacked expert is held."""
        ...

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        ...

    def sure_read(self, experts: int) -> SureRead:
        """The last `experts` of the layer, which every token chooses."""
        ...

    def submit(self, x: Tensor, routing: Routing) -> Any:
        """x [T, hidden], routing [T, k] -> a ticket for `wait`."""
        ...

    def wait(self, ticket: Any) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        ...


class ExpertStore(Protocol):
    """Decides where each routed expert lives."""

    def layer(self, index: int, count: int, width: int, fmt: str) -> Experts:
        """The experts of the index-th MoE layer; ids beyond the routed ones are shared experts."""
        ...


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
        """Packs experts 0 … count - 1 on all workers, while a thread asks `matrices` for those that follow.

        What it gets is a view of the mapped file, or codes and numbers made from it: at most 2 * CHUNK_BYTES at a time,
        unless one expert is larger.
        """

        def chunk(first: int) -> list[ExpertMatrices]:
            experts: list[ExpertMatrices] = []
            nbytes = 0
            while first + len(experts) < count and nbytes < CHUNK_BYTES:
                experts.append(matrices(first + len(experts)))
                nbytes += sum(map(weight_bytes, experts[-1]))
            return experts

        with ThreadPoolExecutor(1, "tandem-load") as thread:
            first, ahead = 0, thread.submit(chunk, 0)
            while first < count:
                experts = ahead.result()
                ahead = thread.submit(chunk, first + len(experts))
                self._layer.load_all(first, experts)
                first += len(experts)

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        return self._layer.bytes_per_expert

    def sure_read(self, experts: int) -> SureRead:
        """The last `experts` of the layer, which every token chooses."""
        return SureRead(self._layer, experts)

    def submit(self, x: Tensor, routing: Routing) -> Ticket:
        """x [T, hidden], routing [T, k]."""
        return Ticket(self._layer.forward(x, routing.ids, routing.weights))

    def wait(self, ticket: Ticket) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        return ticket.result
