"""Which experts the next layer will probably choose, while this one's are being computed.

A layer adds little to the residual stream. So the next layer's router can be asked about the stream as it is now,
before this layer's experts and the next attention have added theirs. It names most of those that it will choose in the
end (Eliseev and Mazur, 2023, "Fast inference of Mixture-of-Experts language models with offloading").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.kernels.ops import SureRead
from tandem.models.layers import BuiltBlock, DecoderLayer
from tandem.models.operator import Operator, Routed
from tandem.models.passing import ForwardState, States


@dataclass(frozen=True, slots=True)
class PredictingExperts:
    """A layer's experts, which ask the next layer's router while others compute."""

    block: Routed
    later: BuiltBlock  # its operator routes
    router: Routed

    def reads(self) -> list[SureRead]:
        return self.block.reads()

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        if not self.router.experts.takes_predictions(len(x)):
            return self.block(x, p, states)
        return self.block(x, p, states, lambda: self._predict_experts(p))

    def _predict_experts(self, p: ForwardState) -> None:
        self.router.predict_experts(self.later.peek(p), p)


def operators(layers: Sequence[DecoderLayer]) -> list[Operator]:
    """Operators of all blocks in order. Experts before a layer with experts ask its router in the meantime."""
    chain: list[Operator] = []
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        chain += [_operator(block.operator, following) for block in layer.blocks]
    return chain


def _operator(operator: Operator, following: DecoderLayer | None) -> Operator:
    if following is None or not isinstance(operator, Routed):
        return operator
    for block in following.blocks:
        if isinstance(block.operator, Routed):
            return PredictingExperts(operator, block, block.operator)
    return operator
