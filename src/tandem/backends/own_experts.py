"""`OwnExperts`: layers of which the first experts are the engine's own, so that they take no memory here."""

from __future__ import annotations

from torch import Tensor

from tandem.experts import CpuExperts, LayerFeed
from tandem.experts.cpu_experts import Ticket
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Routing
from tandem.kernels.packed.cache import KeptLayer
from tandem.spec.activation import SILU, Activation


class OwnExperts:
    """A store of experts in CPU memory."""

    def __init__(self, ops: CpuOps, hidden: int, skipped: int) -> None:
        """skipped: so many of each layer are not here."""
        self._ops, self._hidden, self._skipped = ops, hidden, skipped

    def layer(self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU) -> CpuExperts:
        packed = self._ops.experts(count, self._hidden, width, fmt, activation, cpu_slots=max(1, count - self._skipped))
        return _Rest(packed, self._skipped)


class _Rest(CpuExperts):
    """All but the first ones. Pairs of these are left out."""

    def __init__(self, layer: PackedExperts, skipped: int) -> None:
        super().__init__(layer)
        self._packed, self._skipped = layer, skipped

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None:
        for first, run in feed.runs():
            pairs = [(first + i, matrices) for i, matrices in enumerate(run) if first + i >= self._skipped]
            if pairs:
                self._packed.load_each([expert for expert, _ in pairs], [matrices for _, matrices in pairs])

    def submit(self, x: Tensor, routing: Routing) -> Ticket:
        ids = routing.ids.masked_fill(routing.ids < self._skipped, -1)
        return super().submit(x, Routing(ids, routing.weights))
