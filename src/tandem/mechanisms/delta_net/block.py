"""Gated delta nets: projections around the recurrence."""

from __future__ import annotations

from torch import Tensor

from tandem.architectures.names import Names
from tandem.kernels.ops import SureRead
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import DeltaOperator, DeltaState, DeltaWeights, Product
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of
from tandem.spec.shard import Share, Size


class DeltaNet:
    """q, k, v and gate in one matrix, the two gates of each value head in another."""

    def __init__(self, b: Builder, shape: DeltaRule, name: str) -> None:
        """name: of the module that holds the projections."""
        hidden, name, share = b.config.hidden, name + ".", shard_of(b.config, shape).share
        by_heads = shape.layout == "heads"
        wide = ["in_proj_qkvz"] if by_heads else ["in_proj_qkv", "in_proj_z"]
        narrow = ["in_proj_ba"] if by_heads else ["in_proj_b", "in_proj_a"]
        heads, values = share(shape.v_heads), share(shape.values)
        wide_rows: list[Size] = [share(shape.channels + shape.values)] if by_heads else [_mixed(b, shape), values]
        narrow_rows = [share(2 * shape.v_heads)] if by_heads else [heads, heads]
        self.projected = b.linear([name + module for module in wide], wide_rows, hidden)
        self.gates = b.linear([name + module for module in narrow], narrow_rows, hidden)
        self.delta: DeltaOperator = b.ops.bound(shape, _weights(b, shape, name))
        self.out = b.linear([name + "out_proj"], [hidden], values)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected, self.gates, self.out)

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        answers = self.delta(self.projected(x), Product(x, self.gates), p.batch, DeltaState(*states[0]))
        return self.out(answers)


def _mixed(b: Builder, shape: DeltaRule) -> tuple[Share, ...]:
    """Channels of q, k and v."""
    share, keys = shard_of(b.config, shape).share, shape.k_heads * shape.k_dim
    return share(keys), share(keys), share(shape.values)


def _weights(b: Builder, shape: DeltaRule, name: str) -> DeltaWeights:
    conv = b.float_tensor(name + "conv1d.weight", _mixed(b, shape), 1, shape.conv)
    heads = shard_of(b.config, shape).share(shape.v_heads)
    return DeltaWeights(
        conv=conv[:, 0].T.contiguous(),
        decay=-b.float_tensor(name + "A_log", heads).exp(),
        dt_bias=b.float_tensor(name + "dt_bias", heads),
        norm=b.tensor(name + "norm.weight", shape.v_dim),
    )


def operator(b: Builder, index: int, names: Names, shape: DeltaRule) -> DeltaNet:
    return DeltaNet(b, shape, names.at(index) + names.recurrent)
