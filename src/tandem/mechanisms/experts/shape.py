"""Routed experts, and the feed-forwards beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.router.shape import Router
from tandem.spec.activation import SILU, Activation
from tandem.spec.norm import Norm
from tandem.spec.state import State


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer: feed-forwards of equal shape. biases: of all their matrices. latent: two
    projections stand around all of them, and between these tokens have so many channels."""

    count: int
    width: int
    activation: Activation = SILU
    biases: bool = False
    copied: bool = False  # numbers lie in the checkpoint in another order than kernels read
    latent: int = 0

    def params(self, hidden: int) -> int:
        """Weights of one expert; biases are not counted."""
        return self.activation.matrices * self.channels(hidden) * self.width

    def channels(self, hidden: int) -> int:
        """Channels of an expert's input and output."""
        return self.latent or hidden

    def bias_bytes(self, hidden: int) -> int:
        """Bytes of all experts' biases, float32, wherever experts are computed."""
        each = (self.activation.matrices - 1) * self.width + hidden
        return 4 * self.count * each if self.biases else 0


@dataclass(frozen=True, slots=True)
class ParallelDense:
    """A dense feed-forward that takes a block's input, while router and experts take the residual behind norms of their
    own. Its result and theirs pass a norm each before they are added. The router's norm has `factor` in its weights.
    """

    dense: Dense
    norm: Norm
    factor: float

    def params(self, hidden: int) -> int:
        return self.dense.params(hidden) + 4 * hidden


@dataclass(frozen=True, slots=True)
class Moe:
    """Router, routed experts, and a shared one that every token uses; shared_gate: times sigmoid(gate · x).
    separate_shared: the shared one never counts as routed ones, since it differs from them in some layer."""

    router: Router
    experts: Experts
    shared: Dense | None = None
    shared_gate: bool = False
    parallel_dense: ParallelDense | None = None
    separate_shared: bool = False

    def with_experts(self, count: int) -> Moe:
        """With so many, chosen without groups."""
        router = replace(self.router, num_experts=count, num_groups=1, top_groups=1)
        return replace(self, router=router, experts=replace(self.experts, count=count))

    def activated_by(self, how: Activation) -> Moe:
        """The same experts, routed and shared, with another activation."""
        shared = None if self.shared is None else replace(self.shared, activation=how)
        return replace(self, experts=replace(self.experts, activation=how), shared=shared)

    @property
    def fusible_shared(self) -> int:
        """How many routed-sized experts the shared expert equals; 0 when it has a gate, differs or cannot be cut."""
        width = self.experts.width
        if self.shared is None or self.shared_gate or not width or self.shared.width % width:
            return 0
        if self.experts.biases or self.experts.latent or self.separate_shared:
            return 0
        return self.shared.width // width if self.shared.activation == self.experts.activation else 0

    def params(self, hidden: int) -> int:
        """Weights that every token uses."""
        shared = 0 if self.shared is None else self.shared.params(hidden)
        dense_part = 0 if self.parallel_dense is None else self.parallel_dense.params(hidden)
        scales = self.router.num_experts if self.router.expert_scale else 0
        projections = 2 * hidden * self.experts.latent
        return hidden * self.router.num_experts + scales + shared + dense_part + projections

    def states(self) -> tuple[State, ...]:
        return ()


NO_EXPERTS = Moe(Router(num_experts=0, top_k=0), Experts(count=0, width=0))
"""Stands for routed experts in a model without any."""
