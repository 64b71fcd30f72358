"""Gated convolutions over a few tokens (LFM2): projections around `kernels/recurrent/convolution.py`."""

from __future__ import annotations

from torch import Tensor

from tandem.config.mechanisms.short_conv import ShortConv
from tandem.kernels.ops import SureRead
from tandem.kernels.recurrent.convolution import convolved
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import Pass, States


class ShortConvolution:
    """Gates and input in one matrix."""

    def __init__(self, b: Builder, shape: ShortConv, name: str) -> None:
        """name: of the module that holds the projections."""
        hidden, channels = b.config.hidden, shape.channels
        self.projected = b.linear([f"{name}.in_proj"], [3 * channels], hidden, bias=shape.bias)
        weight = b.float_tensor(f"{name}.conv.weight", channels, 1, shape.taps)
        self.weight = b.ops.resident(weight[:, 0].T.contiguous())
        self.bias = b.float_tensor(f"{name}.conv.bias", channels) if shape.bias else None
        self.out = b.linear([f"{name}.out_proj"], [hidden], channels, bias=shape.bias)

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected, self.out)

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        ((ring,),) = states
        before, behind, values = self.projected(x).chunk(3, dim=1)
        mixed = convolved(before * values, p.rows, ring, self.weight, self.bias)
        return self.out(behind * mixed.to(x.dtype))
