"""Gated delta nets: one decay a head."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from tandem.spec.norm import Norm
from tandem.spec.state import Array, Fold, State

DELTA_CHUNK = 64  # rows of a prompt that a GPU takes together


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Gated delta net (arXiv 2412.06464): a memory of constant size instead of keys and values of all tokens.

    q, k and v pass a causal convolution over the last `conv` tokens. layout: how projections are stored: q, k, v and
    gate of each key head together ("heads"), or of all heads ("kinds").
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    norm: Norm
    layout: Literal["heads", "kinds"]
    gate: Literal["silu", "sigmoid"] = "silu"  # what a head's normed result is multiplied with, of its gate

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k, v."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def chunk_row_bytes(self) -> int:
        """Bytes that a prompt's row leaves between the GPU's kernels. In bfloat16: q, k, v, results, and two numbers
        for each pair of rows of a chunk. In float32: two gates."""
        rows = 2 * self.k_heads * self.k_dim + 2 * self.values
        return 2 * rows + self.v_heads * (2 * 2 * DELTA_CHUNK + 2 * 4)

    @property
    def padded_head(self) -> int:
        """Elements of a head's memory on a GPU, where tiles have powers of two of at least 16."""
        return prod(max(16, 1 << (dim - 1).bit_length()) for dim in (self.k_dim, self.v_dim))

    def params(self, hidden: int) -> int:
        projections = self.channels + 2 * self.values + 2 * self.v_heads
        return hidden * projections + self.channels * self.conv

    def states(self) -> tuple[State, ...]:
        inputs = Array("inputs", (self.channels,)), Array("gates", (2 * self.v_heads,))
        memory = Array("memory", (self.v_heads, self.k_dim, self.v_dim), "float32")
        return (Fold((memory,), inputs, self.conv),)
