"""`CpuExperts`: one layer's experts in CPU memory, computed by the packed kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tandem.experts.feed import LayerFeed
from tandem.kernels.ops import ExpertBiases, ExpertMatrices, Routing, SureRead
from tandem.kernels.packed.cache import KeptLayer
from tandem.spec.activation import SILU, Activation


class RoutedExperts(Protocol):
    """A layer's experts, wherever they live."""

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None:
        """Packs all experts of the feed. Those that are kept from an earlier start are not packed again."""
        ...

    def set_biases(self, biases: ExpertBiases) -> None:
        """Takes the biases of all experts of the layer, after `load`."""
        ...

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        ...

    @property
    def slot_of(self) -> Tensor | None:
        """int32 [experts]: the slot on the GPU, or -1; what `submit` likes to find in its routing. None: no GPU."""
        ...

    def sure_read(self, experts: int) -> SureRead:
        """The last `experts` of the layer, which every token chooses."""
        ...

    def takes_predictions(self, rows: int) -> bool:
        """Whether `prefetch` is worth asking the router for so many rows."""
        ...

    def prefetch(self, routing: Routing) -> None:
        """Names the routing that the next `submit` will probably get. No result depends on it."""
        ...

    def submit(self, x: Tensor, routing: Routing) -> Any:
        """x [T, hidden], routing [T, k] -> a ticket for `wait`."""
        ...

    def wait(self, ticket: Any) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        ...


class ExpertStore(Protocol):
    """Decides where each routed expert lives."""

    def layer(self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU) -> RoutedExperts:
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

    slot_of = None

    def __init__(self, layer: ExpertMatrices, in_place: bool = False) -> None:
        """in_place: the layer uses its experts where they are, so that loading them takes no time."""
        self._layer, self._in_place = layer, in_place

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None:
        """Packs them on all workers."""
        if cache is not None and cache.fill(self._layer):
            return
        if self._in_place:  # looking them up is all there is to do
            return self._layer.load_all(0, feed.all())
        for first, run in feed.runs():
            self._layer.load_all(first, run)
        if cache is not None:
            cache.keep(self._layer)

    def set_biases(self, biases: ExpertBiases) -> None:
        self._layer.set_biases(biases)

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        return self._layer.bytes_per_expert

    def sure_read(self, experts: int) -> SureRead:
        """The last `experts` of the layer, which every token chooses."""
        return SureRead(self._layer, experts)

    def takes_predictions(self, rows: int) -> bool:
        """Between two layers this side computes everything itself."""
        return False

    def prefetch(self, routing: Routing) -> None: ...

    def submit(self, x: Tensor, routing: Routing) -> Ticket:
        """x [T, hidden], routing [T, k]."""
        return Ticket(self._layer.forward(x, routing.ids, routing.weights))

    def wait(self, ticket: Ticket) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden]."""
        return ticket.result
