"""A gated convolution over the last few tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.spec.state import Array, State, WindowRing

CONVOLVED_BYTES = 12
"""Bytes for each channel of a row on a GPU: as projected, convolved in float32, and apart from its neighbours."""


@dataclass(frozen=True, slots=True)
class ShortConv:
    """One projection makes two gates and the input of each channel. The input times the first gate passes a causal
    convolution over the last `taps` tokens; the result, times the second gate, is projected back."""

    channels: int
    taps: int
    bias: bool = False  # of both projections and the convolution

    def params(self, hidden: int) -> int:
        return hidden * 4 * self.channels + self.channels * self.taps

    @property
    def chunk_row_bytes(self) -> int:
        """Bytes that a prompt's row leaves between the GPU's kernels."""
        return CONVOLVED_BYTES * self.channels

    def states(self) -> tuple[State, ...]:
        return (WindowRing(Array("inputs", (self.channels,)), self.taps),)
