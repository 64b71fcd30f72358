"""Delta nets whose channels decay apart (Kimi delta attention): projections around the recurrence."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tandem.architectures.names import Names
from tandem.kernels.ops import SureRead
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.channel_delta.torch import (
    ChannelGates,
    ChannelState,
    ChannelStateUpdates,
    ChannelWeights,
)
from tandem.mechanisms.recurrence.torch import taps_of
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of

PARTS = ("q", "k", "v")


class GateMaker(Protocol):
    """Decays, betas and gates made from hidden states."""

    def reads(self) -> list[SureRead]: ...
    def __call__(self, x: Tensor) -> ChannelGates: ...


class ChannelDeltaNet:
    """q, k and v in one matrix; what leads to decay, gate and beta in others."""

    def __init__(self, b: Builder, shape: ChannelDelta, name: str) -> None:
        """name: of the module that holds the projections."""
        s, hidden, name, share = shape, b.config.hidden, name + ".", shard_of(b.config, shape).share
        inner = share(s.inner)
        self.folds: ChannelStateUpdates = b.ops.bound(shape)
        in_memory = f"{name}forget_gate.dt_bias" in b.checkpoint  # as Transformers has it
        forget = f"{name}forget_gate." if in_memory else name
        self.qkv = b.linear([f"{name}{part}_proj" for part in PARTS], [inner] * 3, hidden)
        self.gates: GateMaker = (_FullRank if s.full_rank else _LowRank)(b, s, name, forget)
        self.taps = taps_of(_convolution(b, s, name), None)
        bias, norm = b.float_tensor(forget + "dt_bias", inner), b.float_tensor(name + "o_norm.weight", s.dim)
        self.weights = ChannelWeights(_decay(b, s, forget), bias, norm, s.norm.eps, s.floor)
        self.out = b.linear([name + "o_proj"], [hidden], inner)

    def reads(self) -> list[SureRead]:
        return [*sure_reads(self.qkv), *self.gates.reads(), *sure_reads(self.out)]

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        (ring,), memory = states
        mixed = self.folds.convolved(self.qkv(x), p, ring, self.taps)
        return self.out(self.folds.corrected(mixed, self.gates(x), p, ChannelState(*memory), self.weights))


class _LowRank:
    """Decay and gate through matrices of a head's width; the first ones and beta's in one matrix."""

    def __init__(self, b: Builder, shape: ChannelDelta, name: str, forget: str) -> None:
        share, self.dim = shard_of(b.config, shape).share, shape.dim
        small, inner = [forget + "f_a_proj", name + "g_a_proj", name + "b_proj"], share(shape.inner)
        self.small = b.linear(small, [shape.dim, shape.dim, share(shape.heads)], b.config.hidden)
        self.forget = b.linear([forget + "f_b_proj"], [inner], shape.dim)
        self.gate = b.linear([name + "g_b_proj"], [inner], shape.dim)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.small, self.forget, self.gate)

    def __call__(self, x: Tensor) -> ChannelGates:
        small = self.small(x)  # no split: a step on a CPU is only recorded where torch computes nothing
        forget, gate = small[:, : self.dim].contiguous(), small[:, self.dim : 2 * self.dim].contiguous()
        return ChannelGates(self.forget(forget), small[:, 2 * self.dim :], self.gate(gate))


class _FullRank:
    """A matrix of each: parts of a common one would have to be copied."""

    def __init__(self, b: Builder, shape: ChannelDelta, name: str, forget: str) -> None:
        share, hidden = shard_of(b.config, shape).share, b.config.hidden
        inner, heads = share(shape.inner), share(shape.heads)
        self.forget = b.linear([forget + "f_proj"], [inner], hidden)
        self.beta = b.linear([name + "b_proj"], [heads], hidden)
        self.gate = b.linear([name + "g_proj"], [inner], hidden)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.forget, self.beta, self.gate)

    def __call__(self, x: Tensor) -> ChannelGates:
        return ChannelGates(self.forget(x), self.beta(x), self.gate(x))


def _decay(b: Builder, shape: ChannelDelta, name: str) -> Tensor:
    """Decay rate of each head, negative: float32 [heads]."""
    heads = shard_of(b.config, shape).share(shape.heads)
    return -b.float_tensor(name + "A_log", heads).exp()


def _convolution(b: Builder, shape: ChannelDelta, name: str) -> Tensor:
    """Convolution weights of q, k and v, stored separately or in one tensor: float32 [3 * inner, taps]."""
    inner = shard_of(b.config, shape).share(shape.inner)
    if f"{name}conv1d.weight" in b.checkpoint:
        weights = [b.float_tensor(f"{name}conv1d.weight", (inner,) * 3, 1, shape.taps)]
    else:
        weights = [b.float_tensor(f"{name}{part}_conv1d.weight", inner, 1, shape.taps) for part in PARTS]
    return torch.cat(weights)[:, 0]


def operator(b: Builder, index: int, names: Names, shape: ChannelDelta) -> ChannelDeltaNet:
    return ChannelDeltaNet(b, shape, names.at(index) + names.recurrent)
