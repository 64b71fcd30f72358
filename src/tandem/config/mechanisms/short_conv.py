"""A gated convolution over the last few tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.state import Array, Ring, State


@dataclass(frozen=True, slots=True)
class ShortConv:
    """One projection makes two gates and the input of each channel. The input times the first gate passes a causal
    convolution over the last `taps` tokens; the result, times the second gate, is projected back."""

    channels: int
    taps: int
    bias: bool = False  # of both projections and the convolution

    def params(self, hidden: int) -> int:
        return hidden * 4 * self.channels + self.channels * self.taps

    def states(self) -> tuple[State, ...]:
        return (Ring(Array("inputs", (self.channels,)), self.taps),)
