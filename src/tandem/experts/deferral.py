"""Expert deferral: in decode steps a token's weakest experts in CPU memory are added one layer later.

Of a token's routed experts, the `kept` of the largest weights are computed in their layer, wherever they live. So are
all that live on the GPU. The sum of the others is added to what the next layer with experts gives. The last such
layer never defers. So the CPU computes while the GPU attends. It is lossy.

In graphs csrc/experts/handoff/mailbox.cc does it. `DeferredExperts` does the same with any operations: it is what
`kt quality` measures, and what tests compare with. Steps that are no graph (prompts, chunks beside decode) defer
nothing.

Chen et al. 2025, "KTransformers: Unleashing the Full Potential of CPU/GPU Hybrid Inference for MoE Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.experts.cpu_experts import RoutedExperts
from tandem.experts.feed import LayerFeed
from tandem.experts.residency import Location, on_location
from tandem.kernels.ops import ExpertBiases, Routing, SureRead
from tandem.kernels.packed.cache import KeptLayer


class Deferral(NamedTuple):
    """Rule for deferred experts: of a token's first `routed` ones, the `kept` of the largest weights are not deferred.
    Of equal weights the earlier one counts as larger. What follows these (shared experts) is never deferred."""

    kept: int
    routed: int

    def deferred_mask(self, routing: Routing) -> Tensor:
        """bool [T, k]: which pairs are deferred; those with a slot on the GPU are not."""
        weights = routing.weights[:, : self.routed]
        order = torch.sort(weights, dim=-1, descending=True, stable=True).indices
        mask = torch.zeros_like(routing.ids, dtype=torch.bool)
        mask.scatter_(1, order[:, self.kept :], True)
        return mask if routing.slots is None else mask & on_location(Location.CPU, routing.slots)


def who_defers(on_cpu: Sequence[bool]) -> list[bool]:
    """on_cpu: whether each layer with experts has some in CPU memory. A layer defers if the next one asks the CPU, too:
    its answer brings what is deferred."""
    return [mine and following for mine, following in pairwise([*on_cpu, False])]


@dataclass(slots=True)
class DeferredSum:
    """Sum that a layer owes to the next: [T, hidden], or None. All layers of a model share one; it is for one batch."""

    sum: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeferredTicket:
    """A batch under way, and what will be computed after its answer."""

    inner: Any
    x: Tensor
    deferred: Routing | None


class DeferredExperts:
    """`RoutedExperts` of a layer, some deferred. Every row counts as one of a decode step."""

    def __init__(self, inner: RoutedExperts, deferral: Deferral | None, due: DeferredSum) -> None:
        """deferral: None for a layer that only takes what is due."""
        self._inner, self._deferral, self._due = inner, deferral, due

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None:
        self._inner.load(feed, cache)

    def set_biases(self, biases: ExpertBiases) -> None:
        self._inner.set_biases(biases)

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        return self._inner.expert_bytes

    @property
    def slot_of(self) -> Tensor | None:
        """As the inner ones'."""
        return self._inner.slot_of

    def sure_read(self, experts: int) -> SureRead:
        """As the inner ones'."""
        return self._inner.sure_read(experts)

    def takes_predictions(self, rows: int) -> bool:
        """Nobody waits between these layers."""
        return False

    def prefetch(self, routing: Routing) -> None: ...

    def submit(self, x: Tensor, routing: Routing) -> DeferredTicket:
        """x [T, hidden], routing [T, k]."""
        if self._deferral is None:
            return DeferredTicket(self._inner.submit(x, routing), x, None)
        deferred = self._deferral.deferred_mask(routing)
        return DeferredTicket(self._inner.submit(x, _only(routing, ~deferred)), x, _only(routing, deferred))

    def wait(self, ticket: DeferredTicket) -> Tensor:
        """sum over k of weight * expert(x), without those that are deferred and with what was due: [T, hidden]."""
        total = self._inner.wait(ticket.inner)
        due, self._due.sum = self._due.sum, None
        if ticket.deferred is not None:
            self._due.sum = self._inner.wait(self._inner.submit(ticket.x, ticket.deferred))
        return total if due is None else total + due


def _only(routing: Routing, chosen: Tensor) -> Routing:
    """The pairs that are chosen; the others are nobody's."""
    slots = routing.slots
    ids = torch.where(chosen, routing.ids, -1)
    return Routing(ids, routing.weights, None if slots is None else torch.where(chosen, slots, -1))
