"""State spaces (Mamba 2): projections around the recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.config.mechanisms.state_space import StateSpace
from tandem.config.ranks.cut import shard_of
from tandem.kernels.ops import SureRead
from tandem.kernels.recurrent.folds import taps_of
from tandem.kernels.recurrent.tokens import Tokens
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import Pass, States


class StateSpaceBlock:
    """Gate, inputs and time steps in one matrix."""

    def __init__(self, b: Builder, shape: StateSpace, name: str) -> None:
        """name: of the module that holds the projections."""
        hidden, name, share = b.config.hidden, name + ".", shard_of(b.config, shape).share
        inner, heads, asked = share(shape.inner), share(shape.heads), share(shape.groups * shape.state)
        mixed = inner, asked, asked
        self.shape, self.folds = shape, b.ops.folds
        self.projected = b.linear([name + "in_proj"], [(inner, *mixed, heads)], hidden, bias=shape.bias)
        conv = b.float_tensor(name + "conv1d.weight", mixed, 1, shape.taps)[:, 0]
        self.taps = taps_of(conv, b.float_tensor(name + "conv1d.bias", mixed) if shape.conv_bias else None)
        self.decay = -b.float_tensor(name + "A_log", heads).exp()
        self.step_bias = b.float_tensor(name + "dt_bias", heads)
        self.through = b.float_tensor(name + "D", heads)
        self.norm = b.float_tensor(name + "norm.weight", inner)
        self.out = b.linear([name + "out_proj"], [hidden], inner, bias=shape.bias)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected, self.out)

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        s, ((ring,), (memory,)) = self.shape, states
        gate, new, steps = self.projected(x).split([s.inner, s.channels, s.heads], dim=1)
        mixed = self.folds.convolved(new, p, ring, self.taps)
        values, wide = mixed[:, : s.inner].unflatten(1, (s.heads, s.head_dim)), s.groups * s.state
        written, asked = (part.unflatten(1, (s.groups, s.state)) for part in mixed[:, s.inner :].split(wide, dim=1))
        long = F.softplus(steps.float() + self.step_bias)
        tokens = Tokens(asked, written, values * long[..., None], (long * self.decay)[..., None])
        seen = self.folds.folded(tokens, p, memory).addcmul_(values, self.through[:, None])
        return self.out(self._normed(seen.flatten(1), gate))

    def _normed(self, y: Tensor, gate: Tensor) -> Tensor:
        gated = y.mul_(F.silu(gate.float())).unflatten(1, (self.shape.groups, -1))
        squares = torch.linalg.vector_norm(gated, dim=-1, keepdim=True).square_()
        gated.mul_(squares.div_(gated.shape[-1]).add_(self.shape.norm.eps).rsqrt_())
        return y.mul_(self.norm).to(gate.dtype)
