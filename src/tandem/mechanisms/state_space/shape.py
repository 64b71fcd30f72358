"""A state space whose decay depends on the token (Mamba 2)."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.mechanisms.short_conv.shape import CONVOLVED_BYTES
from tandem.spec.norm import Norm
from tandem.spec.state import Array, Fold, State, WindowRing

SCAN_CHUNK = 64  # rows of a prompt that a GPU multiplies together


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba 2 (arXiv 2405.21060): each head keeps a memory [state, head_dim] instead of keys and values of all tokens.

    A projection makes a gate, the heads' inputs, what is written and what is asked (of each group of heads), and a time
    step of each head. All but gate and steps pass a causal convolution over the last `taps` tokens. The result times
    the gate's silu passes a norm over each group's channels.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    norm: Norm
    bias: bool = False  # of both projections
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state

    def params(self, hidden: int) -> int:
        return hidden * (2 * self.inner + self.channels + self.heads) + self.channels * self.taps

    @property
    def chunk_row_bytes(self) -> int:
        """Bytes that a prompt's row leaves between the GPU's kernels."""
        return CONVOLVED_BYTES * self.channels + 16 * self.inner + 4 * SCAN_CHUNK * self.groups

    def states(self) -> tuple[State, ...]:
        memory = Array("memory", (self.heads, self.state, self.head_dim), "float32")
        return (WindowRing(Array("inputs", (self.channels,)), self.taps), Fold((memory,)))
