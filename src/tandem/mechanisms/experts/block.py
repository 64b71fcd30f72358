"""Feed-forward blocks, written in `Ops` only. x is [T, hidden] everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.architectures.names import Names
from tandem.experts import ExpertMatrices, RoutedExperts
from tandem.formats.cut import columns_of, rows_of
from tandem.kernels.joined import AfterNorm, EarlyDense
from tandem.kernels.ops import MLP, Addend, Linear, Routing, SureRead
from tandem.mechanisms.dense.block import dense_mlp
from tandem.mechanisms.experts.shape import Moe, ParallelDense
from tandem.mechanisms.router.torch import Route
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.names import expert_biases, expert_matrices, mlp_matrices, ungated
from tandem.models.operator import Routed
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of
from tandem.spec.model_config import moe_index


class MoEBlock(Routed):
    """Router, routed experts, shared expert. Routes and calls experts; where they run is not known here.

    With `plan.fuse_shared_experts`, an ungated shared expert is cut into experts of the routed ones' width, if it is a
    multiple of that. Every token chooses them. So a layer's experts are one call.
    """

    def __init__(self, b: Builder, index: int, shape: Moe, names: Names) -> None:
        layer = names.at(index)
        self.ops, self.router = b.ops, shape.router
        self.route: Route = b.ops.bound(shape.router)
        self.fused = shape.fusible_shared if b.plan.fuse_shared_experts else 0
        self.gate = _router_gate(b, shape, layer, names)
        self.tally, self.number = b.tally(index), moe_index(b.config, index)
        self.bias = self.table = self.scales = None
        if self.router.expert_scale:
            self.scales = b.float_tensor(layer + names.expert_scale, self.router.num_experts)
        if self.router.table:
            table = layer + names.router_table
            token_experts = b.checkpoint.get(table, (b.config.vocab, self.router.top_k), whole=True)
            self.table = b.ops.resident(token_experts.to(torch.int32, copy=True))
        if self.router.has_bias:
            self.bias = b.float_tensor(layer + names.router_bias, self.router.num_experts)
        self.experts = routed_experts(b, index, shape, names, self.fused)
        self.shared: MLP | None = None
        self.fuse_shared_add = False  # whoever takes the result adds the shared expert's, which is left in the pass
        if shape.shared is not None and not self.fused:
            self.shared = dense_mlp(b, layer + names.shared, shape.shared)
        # What x is multiplied with first, if its norm may be a part of that. Here, as protocols take long to look up.
        self.first = None if self.router.float32_logits or not isinstance(self.gate, AfterNorm) else self.gate
        self._begin = self.shared.begin if isinstance(self.shared, EarlyDense) else None

    def reads(self) -> list[SureRead]:
        """Weights in the order of `__call__`."""
        routed = [*sure_reads(self.gate), self.experts.sure_read(self.fused)]
        return routed + ([] if self.shared is None else self.shared.reads())

    def __call__(
        self, x: Tensor, p: ForwardState, states: States, host_work: Callable[[], None] | None = None
    ) -> Tensor:
        """host_work: called while others compute."""
        (logits, gate), named = self._split(p.product(self.gate, x) if self.first else self._product(x)), self._named(p)
        routing = self._routed(logits, p, named)
        finish_shared = self._begun(x)  # reads beside the router's choice, whose memory is still held
        ticket = self._submit(x, routing)
        shared = None if finish_shared is None else finish_shared()
        if host_work is not None:
            host_work()
        routed = self._wait(ticket)
        if shared is None:
            return routed
        if self.fuse_shared_add:
            p.addend = Addend(shared, gate)
            return routed
        return self.ops.gated(shared, gate, routed)

    def predict_experts(self, x: Tensor, p: ForwardState) -> None:
        """x: about what the next call will be given. Tells the experts who would be chosen; nobody is counted."""
        slot_of, named = self.experts.slot_of, self._named(p)
        self.experts.prefetch(
            self.route(self._logits(x)[0], self.bias, slot_of=slot_of, chosen=named)
        )

    def _submit(self, x: Tensor, routing: Routing) -> Any:
        """To the experts: what their `submit` gives."""
        return self.experts.submit(x, routing)

    def _wait(self, ticket: Any) -> Tensor:
        """The experts' sum, [T, hidden]."""
        return self.experts.wait(ticket)

    def _begun(self, x: Tensor) -> Callable[[], Tensor] | None:
        """The shared expert, which is ended later."""
        if self.shared is None:
            return None
        return partial(self.shared, x) if self._begin is None else self._begin(x)

    def _routed(self, logits: Tensor, p: ForwardState, named: Tensor | None) -> Routing:
        """Counts who is chosen."""
        slot_of = self.experts.slot_of
        tally = self.tally if p.tallies is None else p.tallies[self.number]
        routing = self.route(logits, self.bias, self.fused, tally, slot_of, named)
        if self.scales is None:
            return routing
        return routing._replace(weights=routing.weights * self.scales[routing.ids.long()])

    def _named(self, p: ForwardState) -> Tensor | None:
        """The experts that a table names for each token, int32 [T, k]."""
        return None if self.table is None else self.table[p.batch.input_ids]

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of the router [T, E], and of the shared expert's gate [T, 1], if it has one."""
        return self._split(self._product(x))

    def _product(self, x: Tensor) -> Tensor:
        return self.gate(x, torch.float32) if self.router.float32_logits else self.gate(x)

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        experts = self.router.num_experts
        return (y, None) if y.shape[1] == experts else (y[:, :experts], y[:, experts:])


class ExpertsBeside(MoEBlock):
    """Router and experts, which take the residual, beside a dense feed-forward, which takes what the block is given.
    Both results have norms, so ranks add up each."""

    first = None
    sums_itself = True

    def __init__(self, b: Builder, index: int, shape: Moe, dense: ParallelDense, names: Names) -> None:
        super().__init__(b, index, shape, names)
        layer, hidden, norm = names.at(index), b.config.hidden, dense.norm
        self.eps = norm.eps
        self.dense = dense_mlp(b, layer + names.dense, dense.dense)
        self.router_norm = b.float_tensor(layer + names.router_norm, hidden) * dense.factor
        norms = [b.norm(f"{layer}{name}.weight", norm, hidden) for name in names.beside_norms]
        self.dense_norm, self.experts_norm, self.result_norm = norms

    def reads(self) -> list[SureRead]:
        return super().reads() + self.dense.reads()

    def __call__(
        self, x: Tensor, p: ForwardState, states: States, host_work: Callable[[], None] | None = None
    ) -> Tensor:
        routing = self._routed(self._logits(self._router_input(p))[0], p, self._named(p))
        ticket = self.experts.submit(self.ops.rms_norm(p.residual, self.experts_norm, self.eps), routing)
        dense = self.ops.rms_norm(self._summed(self.dense(x)), self.dense_norm, self.eps)
        if host_work is not None:
            host_work()
        experts = self._summed(self.experts.wait(ticket))
        return dense.add_(self.ops.rms_norm(experts, self.result_norm, self.eps))

    def _summed(self, rows: Tensor) -> Tensor:
        return rows if self.ops.group is None else self.ops.group.sum(rows)

    def predict_experts(self, x: Tensor, p: ForwardState) -> None:
        super().predict_experts(self._router_input(p), p)

    def _router_input(self, p: ForwardState) -> Tensor:
        """Router input: the normed residual."""
        return self.ops.rms_norm(p.residual, self.router_norm, self.eps)


class LatentExperts(MoEBlock):
    """Experts compute in fewer channels, between two projections that all share. Router and shared expert do not."""

    def __init__(self, b: Builder, index: int, shape: Moe, names: Names) -> None:
        super().__init__(b, index, shape, names)
        (before, behind), layer = names.latent, names.at(index)
        hidden, latent = b.config.hidden, shape.experts.latent
        self.before = b.linear([layer + before], [latent], hidden)
        self.behind = b.linear([layer + behind], [hidden], latent)

    def reads(self) -> list[SureRead]:
        return [*super().reads(), *sure_reads(self.before), *sure_reads(self.behind)]

    def _submit(self, x: Tensor, routing: Routing) -> Any:
        return self.experts.submit(self.before(x), routing)

    def _wait(self, ticket: Any) -> Tensor:
        return self.behind(self.experts.wait(ticket))


def operator(b: Builder, index: int, names: Names, shape: Moe) -> MoEBlock:
    if shape.experts.latent:
        return LatentExperts(b, index, shape, names)
    if shape.parallel_dense is None:
        return MoEBlock(b, index, shape, names)
    return ExpertsBeside(b, index, shape, shape.parallel_dense, names)


def _router_gate(b: Builder, shape: Moe, layer: str, names: Names) -> Linear:
    """The router and, below it, the gate of the shared expert: one matrix, for each is small."""
    rows, hidden = [shape.router.num_experts], b.config.hidden
    if not shape.shared_gate:
        if shape.router.float32_logits:
            return b.float_linear(layer + names.router, rows[0], hidden)
        return b.linear([layer + names.router], rows, hidden, bias=shape.router.logits_bias)
    assert not (shape.router.float32_logits or shape.router.logits_bias), "gates beside such routers"
    return b.linear([layer + names.router, layer + names.shared_gate], [*rows, 1], hidden)


def routed_experts(b: Builder, index: int, shape: Moe, names: Names, fused: int = 0) -> RoutedExperts:
    """The routed experts of decoder layer `index`, loaded, then the `fused` ones of the shared expert."""
    hidden, routed = shape.experts.channels(b.config.hidden), shape.experts.count
    share = shard_of(b.config, shape).share
    width, shared = shape.experts.width, share(0 if shape.shared is None else shape.shared.width)
    gated, sizes = shape.experts.activation.gated, (routed, hidden, share(width))

    def matrices_of(index: int) -> Callable[[int], ExpertMatrices]:
        layer = names.at(index)

        def matrices(expert: int) -> ExpertMatrices:
            if expert < routed:
                weights = expert_matrices(names.experts, b.checkpoint, layer, expert, sizes, gated)
                return weights if gated else ungated(*weights[1:])
            gate, up, down = mlp_matrices(b.checkpoint, layer + names.shared, hidden, shared, gated)
            cut = slice((expert - routed) * width, (expert - routed + 1) * width)
            own = rows_of(gate, cut), rows_of(up, cut), columns_of(down, cut)
            return own if gated else ungated(*own[1:])

        return matrices

    biases = None
    if shape.experts.biases:
        biases = expert_biases(names.experts, b.checkpoint, names.at(index), sizes)
        biases = biases if b.config.shard.first else biases._replace(down=torch.zeros_like(biases.down))
    return b.experts(index, replace(shape.experts, count=routed + fused), matrices_of, biases)
