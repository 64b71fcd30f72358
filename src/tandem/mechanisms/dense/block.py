"""Dense feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tandem.architectures.names import Names
from tandem.experts import ExpertMatrices
from tandem.kernels.ops import MLP, SureRead
from tandem.mechanisms.dense.shape import Dense
from tandem.models.builder import Builder
from tandem.models.names import mlp_matrices, ungated
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """A dense feed-forward as an operator."""

    mlp: MLP

    def reads(self) -> list[SureRead]:
        return self.mlp.reads()

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        return self.mlp(x)


def dense_mlp(b: Builder, prefix: str, shape: Dense) -> MLP:
    """A feed-forward for every token."""
    hidden, width, gated = b.config.hidden, shard_of(b.config, shape).share(shape.width), shape.activation.gated

    def matrices() -> ExpertMatrices:
        weights = mlp_matrices(b.checkpoint, prefix, hidden, width, gated)
        return weights if gated else ungated(*weights[1:])

    return b.mlp(prefix, shape, matrices)


def operator(b: Builder, index: int, names: Names, shape: Dense) -> DenseBlock:
    return DenseBlock(dense_mlp(b, names.at(index) + names.dense, shape))
