"""Gated convolutions over a few tokens (LFM2): projections around the convolution."""

from __future__ import annotations

from torch import Tensor

from tandem.architectures.names import Names
from tandem.kernels.ops import SureRead
from tandem.mechanisms.recurrence.torch import StateUpdates, taps_of
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of


class ShortConvolution:
    """Gates and input in one matrix."""

    def __init__(self, b: Builder, shape: ShortConv, name: str) -> None:
        """name: of the module that holds the projections."""
        hidden, channels = b.config.hidden, shard_of(b.config, shape).share(shape.channels)
        self.folds: StateUpdates = b.ops.bound(shape)
        self.projected = b.linear([f"{name}.in_proj"], [(channels,) * 3], hidden, bias=shape.bias)
        conv = b.float_tensor(f"{name}.conv.weight", channels, 1, shape.taps)[:, 0]
        self.taps = taps_of(conv, b.float_tensor(f"{name}.conv.bias", channels) if shape.bias else None)
        self.out = b.linear([f"{name}.out_proj"], [hidden], channels, bias=shape.bias)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected, self.out)

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        ((ring,),) = states
        return self.out(self.folds.gated(self.projected(x), p, ring, self.taps))


def operator(b: Builder, index: int, names: Names, shape: ShortConv) -> ShortConvolution:
    return ShortConvolution(b, shape, names.at(index) + names.recurrent)
