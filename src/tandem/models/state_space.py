"""State spaces (Mamba 2): projections around the recurrence."""

from __future__ import annotations

from torch import Tensor

from tandem.config.mechanisms.state_space import StateSpace
from tandem.kernels.ops import SureRead
from tandem.kernels.recurrent.state_space import StateSpaceWeights, TorchStateSpace
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import Pass, States


class StateSpaceBlock:
    """Gate, inputs and time steps in one matrix."""

    def __init__(self, b: Builder, shape: StateSpace, name: str) -> None:
        """name: of the module that holds the projections."""
        rows, hidden = shape.inner + shape.channels + shape.heads, b.config.hidden
        self.projected = b.linear([f"{name}.in_proj"], [rows], hidden, bias=shape.bias)
        self.space = TorchStateSpace(shape, _weights(b, shape, f"{name}."))
        self.out = b.linear([f"{name}.out_proj"], [hidden], shape.inner, bias=shape.bias)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected, self.out)

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        (ring,), (memory,) = states
        return self.out(self.space(self.projected(x), p.rows, ring, memory))


def _weights(b: Builder, shape: StateSpace, name: str) -> StateSpaceWeights:
    conv = b.float_tensor(f"{name}conv1d.weight", shape.channels, 1, shape.taps)
    return StateSpaceWeights(
        conv=b.ops.resident(conv[:, 0].T.contiguous()),
        conv_bias=b.float_tensor(f"{name}conv1d.bias", shape.channels) if shape.conv_bias else None,
        decay=-b.float_tensor(f"{name}A_log", shape.heads).exp(),
        step_bias=b.float_tensor(f"{name}dt_bias", shape.heads),
        through=b.float_tensor(f"{name}D", shape.heads),
        norm=b.float_tensor(f"{name}norm.weight", shape.inner),
    )
