"""Delta nets whose channels decay apart (Kimi delta attention): projections around the recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.config.mechanisms.channel_delta import ChannelDelta
from tandem.config.ranks.cut import shard_of
from tandem.kernels.delta import UNIT_EPS
from tandem.kernels.ops import SureRead
from tandem.kernels.recurrent.folds import Tokens, taps_of
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
        self.decay = _decay(b, s, forget)
        self.bias = b.float_tensor(forget + "dt_bias", inner)
        self.taps = taps_of(_convolution(b, s, name), None)
        self.norm = b.float_tensor(name + "o_norm.weight", s.dim)
        self.out = b.linear([name + "o_proj"], [hidden], inner)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.qkv, self.small, self.forget, self.gate, self.out)

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        s, ((ring,), (memory,)) = self.shape, states
        mixed = self.folds.convolved(self.qkv(x), p, ring, self.taps).unflatten(1, (3, s.heads, s.dim))
        q, k, v = mixed.unbind(1)
        forget, gate, beta = self.small(x).split([s.dim, s.dim, s.heads], dim=1)
        passed = F.softplus(self.forget(forget.contiguous()).float() + self.bias).unflatten(1, (s.heads, s.dim))
        tokens = Tokens(_unit(q) * s.dim**-0.5, _unit(k), v, passed * self.decay, beta.sigmoid().float())
        seen = self.folds.folded(tokens, p, memory).to(x.dtype)
        return self.out(self._normed(seen, self.gate(gate.contiguous())))

    def _normed(self, seen: Tensor, gate: Tensor) -> Tensor:
        """Of each head, times the sigmoid of its gate."""
        y = seen.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.shape.norm.eps) * self.norm
        return (y.flatten(1) * gate.float().sigmoid()).to(seen.dtype)


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)
    return unit


def _decay(b: Builder, shape: ChannelDelta, name: str) -> Tensor:
    """Of each head, float32 [heads, 1]."""
    heads = shard_of(b.config, shape).share(shape.heads)
    stored = b.float_tensor(name + "A_log", 1, 1, heads.whole, 1).view(heads.whole, 1)
    return -b.ops.resident(stored[heads.cut].contiguous()).exp()


def _convolution(b: Builder, shape: ChannelDelta, name: str) -> Tensor:
    """Of q, k and v, each apart or all in one, float32 [3 * inner, taps]."""
    inner = shard_of(b.config, shape).share(shape.inner)
    if f"{name}conv1d.weight" in b.checkpoint:
        found = [b.float_tensor(f"{name}conv1d.weight", (inner,) * 3, 1, shape.taps)]
    else:
        found = [b.float_tensor(f"{name}{part}_conv1d.weight", inner, 1, shape.taps) for part in PARTS]
    return torch.cat(found)[:, 0]
