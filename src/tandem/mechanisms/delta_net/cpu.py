"""Gated delta nets on the C++ core."""

from __future__ import annotations

from torch import Tensor

from tandem import _core
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.cpu_ops import CpuOps
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import (
    DeltaOperator,
    DeltaState,
    DeltaWeights,
    Gates,
    columns_of,
    gate_matrix,
)


class CpuDelta:
    """`DeltaOperator` on the C++ core, token by token: 2 % of a Qwen3-Next's work, for results that no cut changes."""

    def __init__(self, ops: CpuOps, shape: DeltaRule, weights: DeltaWeights) -> None:
        self._ops, self._eps = ops, shape.norm.eps
        self._weights = weights._replace(conv=weights.conv.contiguous())
        gates = 2 * shape.v_heads
        self._shape = _core.DeltaShape(
            shape.k_heads, shape.v_heads, shape.k_dim, shape.v_dim, shape.conv, columns_of(shape),
            shape.channels + shape.values, gates, shape.gate == "sigmoid",
        )  # fmt: skip

    def __call__(self, projected: Tensor, gates: Gates, batch: KernelBatch, state: DeltaState) -> Tensor:
        gates = gate_matrix(gates)
        out = projected.new_empty((len(projected), state.memory.shape[1] * state.memory.shape[3]))
        self._ops.dense.delta_rule(
            self._ops.view_of(batch), self._shape, projected, gates, *self._weights, *state, out, self._eps
        )
        return out


def bound(ops: CpuOps, shape: DeltaRule, weights: DeltaWeights) -> DeltaOperator:
    return CpuDelta(ops, shape, weights)
