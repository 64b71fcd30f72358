"""Gated delta nets: projections around the recurrence."""

from __future__ import annotations

from torch import Tensor

from tandem.config.layers import DeltaRule
from tandem.kernels.delta import DeltaState, DeltaWeights, Product
from tandem.kernels.ops import SureRead
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import Pass, States


class DeltaNet:
    """q, k, v and gate in one matrix, the two gates of each value head in another."""

    def __init__(self, b: Builder, shape: DeltaRule, name: str) -> None:
        """name: of the module that holds the projections."""
        hidden, name = b.config.hidden, name + "."
        together = shape.layout == "heads"
        wide = ["in_proj_qkvz"] if together else ["in_proj_qkv", "in_proj_z"]
        narrow = ["in_proj_ba"] if together else ["in_proj_b", "in_proj_a"]
        wide_rows = [shape.channels + shape.values] if together else [shape.channels, shape.values]
        narrow_rows = [2 * shape.v_heads] if together else [shape.v_heads, shape.v_heads]
        self.projected = b.linear([name + module for module in wide], wide_rows, hidden)
        self.gates = b.linear([name + module for module in narrow], narrow_rows, hidden)
        self.delta = b.ops.delta_rule(shape, _weights(b, shape, name))
        self.out = b.linear([name + "out_proj"], [hidden], shape.values)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected, self.gates, self.out)

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        seen = self.delta(self.projected(x), Product(x, self.gates), p.batch, DeltaState(*states[0]))
        return self.out(seen)


def _weights(b: Builder, shape: DeltaRule, name: str) -> DeltaWeights:
    conv = b.float_tensor(name + "conv1d.weight", shape.channels, 1, shape.conv)
    return DeltaWeights(
        conv=conv[:, 0].T.contiguous(),
        decay=-b.float_tensor(name + "A_log", shape.v_heads).exp(),
        dt_bias=b.float_tensor(name + "dt_bias", shape.v_heads),
        norm=b.tensor(name + "norm.weight", shape.v_dim),
    )
