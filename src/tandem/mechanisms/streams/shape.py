"""Several streams in place of one residual."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.spec.state import LANES


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyper-connections (arXiv 2512.24880) in place of one residual: `streams` of them.

    All streams make, in float32, weights of three kinds: how they are summed up for a block, how much of its result
    each gets, and how they mix. The mixing matrix is normed by rows and columns in turn, `iterations` times, so that it
    neither grows nor shrinks what it mixes. mean: behind the last block they are summed up alike.
    """

    streams: int
    iterations: int
    eps: float  # of those norms
    norm_eps: float  # of the norm of all streams together
    mean: bool = False

    @property
    def weights(self) -> int:
        """That a token makes for each block."""
        return (2 + self.streams) * self.streams

    def params(self, hidden: int) -> int:
        """Weights of a block, float32."""
        return self.weights * self.streams * hidden

    def end_params(self, hidden: int) -> int:
        """Weights after the last block: too few to count."""
        return 0

    def norm_channels(self, hidden: int) -> int:
        """Channels of a block's norm."""
        return hidden

    def matrix_bytes(self, hidden: int, each: int) -> int:
        """Bytes of a block's matrix, as packed in float32: rows are filled up to whole vectors. each: of the
        activations' numbers."""
        return 4 * -(-self.weights // LANES) * LANES * self.streams * hidden
