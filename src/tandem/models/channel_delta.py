"""Delta nets whose channels decay apart (Kimi delta attention): projections around the recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.config.mechanisms.channel_delta import ChannelDelta
from tandem.config.ranks.cut import shard_of
from tandem.kernels.ops import SureRead
from tandem.kernels.recurrent.channels import ChannelGates, ChannelWeights
from tandem.kernels.recurrent.folds import taps_of
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import Pass, States

PARTS = ("q", "k", "v")


class ChannelDeltaNet:
    """q, k and v in one matrix; what leads to decay, gate and beta in another."""

    def __init__(self, b: Builder, shape: ChannelDelta, name: str) -> None:
        """name: of the module that holds the projections."""
        s, hidden, name, share = shape, b.config.hidden, name + ".", shard_of(b.config, shape).share
        inner = share(s.inner)
        self.shape, self.folds = shape, b.ops.folds
        in_memory = f"{name}forget_gate.dt_bias" in b.checkpoint  # as Transformers has it
        forget = f"{name}forget_gate." if in_memory else name
        self.qkv = b.linear([f"{name}{part}_proj" for part in PARTS], [inner] * 3, hidden)
        small = [forget + "f_a_proj", name + "g_a_proj", name + "b_proj"]
        self.small = b.linear(small, [s.dim, s.dim, share(s.heads)], hidden)
        self.forget = b.linear([forget + "f_b_proj"], [inner], s.dim)
        self.gate = b.linear([name + "g_b_proj"], [inner], s.dim)
        self.taps = taps_of(_convolution(b, s, name), None)
        bias, norm = b.float_tensor(forget + "dt_bias", inner), b.float_tensor(name + "o_norm.weight", s.dim)
        self.weights = ChannelWeights(_decay(b, s, forget), bias, norm, s.norm.eps)
        self.out = b.linear([name + "o_proj"], [hidden], inner)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.qkv, self.small, self.forget, self.gate, self.out)

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        s, ((ring,), (memory,)) = self.shape, states
        mixed = self.folds.convolved(self.qkv(x), p, ring, self.taps)
        small = self.small(x)  # no split: a step on a CPU is only recorded where torch computes nothing
        forget, gate = small[:, : s.dim].contiguous(), small[:, s.dim : 2 * s.dim].contiguous()
        gates = ChannelGates(self.forget(forget), small[:, 2 * s.dim :], self.gate(gate))
        return self.out(self.folds.corrected(mixed, gates, p, memory, self.weights))


def _decay(b: Builder, shape: ChannelDelta, name: str) -> Tensor:
    """Of each head, float32 [heads]."""
    heads = shard_of(b.config, shape).share(shape.heads)
    stored = b.float_tensor(name + "A_log", 1, 1, heads.whole, 1).view(heads.whole)
    return -b.ops.resident(stored[heads.cut].contiguous()).exp()


def _convolution(b: Builder, shape: ChannelDelta, name: str) -> Tensor:
    """Of q, k and v, each apart or all in one, float32 [3 * inner, taps]."""
    inner = shard_of(b.config, shape).share(shape.inner)
    if f"{name}conv1d.weight" in b.checkpoint:
        found = [b.float_tensor(f"{name}conv1d.weight", (inner,) * 3, 1, shape.taps)]
    else:
        found = [b.float_tensor(f"{name}{part}_conv1d.weight", inner, 1, shape.taps) for part in PARTS]
    return torch.cat(found)[:, 0]
