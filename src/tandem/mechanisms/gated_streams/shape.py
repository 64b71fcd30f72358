"""Several streams in place of one residual, which never mix: what a block takes of them passes gates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedStreams:
    """Gated residual streams (Qwen3.8-Flash-Next).

    All streams are normed, each by itself, in front of a block. Through two matrices of `rank` channels between them
    they make a gate for each channel of each stream; a block takes the mean of what passes. A third matrix makes how
    much of its result each stream gets. Behind the last block the streams are summed up likewise.
    """

    streams: int
    rank: int

    def params(self, hidden: int) -> int:
        """Weights of a block, with those that its norm has beyond one stream's."""
        return self.end_params(hidden) + self.streams * self.streams * hidden

    def norm_channels(self, hidden: int) -> int:
        """Channels of a block's norm: those of all streams."""
        return self.streams * hidden

    def matrix_bytes(self, hidden: int, each: int) -> int:
        """Bytes of a block's matrices; each: bytes of a number of the activations' type."""
        return each * self.params(hidden)

    def end_params(self, hidden: int) -> int:
        """Weights after the last block, with those that its norm has beyond one stream's."""
        wide = self.streams * hidden
        return 2 * self.rank * wide + wide - hidden
