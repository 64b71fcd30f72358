"""State spaces (Mamba 2): projections around the recurrence."""

from __future__ import annotations

from torch import Tensor

from tandem.architectures.names import Names
from tandem.kernels.ops import SureRead
from tandem.mechanisms.recurrence.torch import taps_of
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.mechanisms.state_space.torch import SpaceInputs, SpaceStateUpdates, SpaceWeights
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of


class StateSpaceBlock:
    """Gate, inputs and time steps in one matrix."""

    def __init__(self, b: Builder, shape: StateSpace, name: str) -> None:
        """name: of the module that holds the projections."""
        hidden, name, share = b.config.hidden, name + ".", shard_of(b.config, shape).share
        inner, heads, keys = share(shape.inner), share(shape.heads), share(shape.groups * shape.state)
        mixed = inner, keys, keys
        self.shape = shape
        self.folds: SpaceStateUpdates = b.ops.bound(shape)
        self.projected = b.linear([name + "in_proj"], [(inner, *mixed, heads)], hidden, bias=shape.bias)
        conv = b.float_tensor(name + "conv1d.weight", mixed, 1, shape.taps)[:, 0]
        self.taps = taps_of(conv, b.float_tensor(name + "conv1d.bias", mixed) if shape.conv_bias else None)
        decay = -b.float_tensor(name + "A_log", heads).exp()
        bias, through = b.float_tensor(name + "dt_bias", heads), b.float_tensor(name + "D", heads)
        norm = b.float_tensor(name + "norm.weight", inner)
        self.weights = SpaceWeights(decay, bias, through, norm, shape.groups, shape.norm.eps)
        self.out = b.linear([name + "out_proj"], [hidden], inner, bias=shape.bias)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected, self.out)

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        s, ((ring,), (memory,)) = self.shape, states
        projected = self.projected(x)  # no split: a step on a CPU is only recorded where torch computes nothing
        gate, steps = projected[:, : s.inner], projected[:, s.inner + s.channels :]
        mixed = self.folds.convolved(projected[:, s.inner : s.inner + s.channels], p, ring, self.taps)
        return self.out(self.folds.spaced(SpaceInputs(mixed, gate, steps), p, memory, self.weights))


def operator(b: Builder, index: int, names: Names, shape: StateSpace) -> StateSpaceBlock:
    return StateSpaceBlock(b, shape, names.at(index) + names.recurrent)
