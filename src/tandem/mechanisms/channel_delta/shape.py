"""A delta net each of whose keys' channels decays by itself (Kimi, Ling 3, GLM-5.3-Flash)."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.mechanisms.short_conv.shape import CONVOLVED_BYTES
from tandem.spec.norm import Norm
from tandem.spec.state import Array, Fold, State, WindowRing

CORRECT_CHUNK = 64  # rows of a prompt that a GPU takes together


@dataclass(frozen=True, slots=True)
class ChannelDelta:
    """Kimi delta attention (arXiv 2510.26692): a memory of constant size instead of keys and values of all tokens.

    q, k and v pass a causal convolution over the last `taps` tokens; q and k get unit length. What decays and a gate of
    the result come through small matrices of a head's width, or with `full_rank` of one matrix each.
    """

    heads: int
    dim: int  # of a head's query, key and value
    taps: int
    norm: Norm  # of a head's result
    floor: float = 0.0  # no decay's logarithm is below it; 0: it has none
    full_rank: bool = False

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.dim

    def params(self, hidden: int) -> int:
        small = 2 * hidden * self.dim + 2 * self.dim * self.inner
        gates = 2 * hidden * self.inner if self.full_rank else small
        return 4 * hidden * self.inner + gates + hidden * self.heads + 3 * self.inner * self.taps

    @property
    def chunk_row_bytes(self) -> int:
        """Bytes that a prompt's row leaves between the GPU's kernels, with its share of a chunk's pairs and memory."""
        pairs, memory = 8 * CORRECT_CHUNK * self.heads, 4 * self.dim * self.inner // CORRECT_CHUNK
        return (CONVOLVED_BYTES * 3 + 32 + 20) * self.inner + pairs + memory

    def states(self) -> tuple[State, ...]:
        memory = Array("memory", (self.heads, self.dim, self.dim), "float32")
        mixed, forget = Array("mixed", (3 * self.inner,), "float32"), Array("forget", (self.inner,))
        inputs = mixed, forget, Array("beta", (self.heads,))
        return (WindowRing(Array("inputs", (3 * self.inner,)), self.taps), Fold((memory,), inputs))
