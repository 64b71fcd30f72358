"""Sizes of n-grams: a token and those before it add to the residual streams, out of a table that is read by row."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.spec.norm import Norm
from tandem.spec.state import Array, State, WindowRing
from tandem.spec.stored import RowTable

MOST_VOCAB = 1 << 24  # ids are kept as float32, exactly


@dataclass(frozen=True, slots=True)
class Ngram:
    """N-grams of 2 to `longest` tokens that end in a token, each hashed by `heads` hashes (Qwen3.8-Flash-Next's PLE).

    The rows that a token's hashes name, side by side, make a key for each residual stream and one value. A key's
    product with its stream, normed, gates what the stream is given of the value. A dilated convolution over what
    earlier tokens gave follows. n-grams do not reach back over the token `stop`, which also stands for what is missing.
    """

    longest: int
    heads: int  # of each length
    table: RowTable
    taps: int
    streams: int
    hidden: int
    stop: int
    norm: Norm

    def __post_init__(self) -> None:
        if self.longest < 2 or self.heads < 1 or self.taps < 2:
            raise ConfigError(
                "config.json: ngram_size, heads_per_ngram and ple_conv_kernel_size must be at least 2, 1 and 2; "
                "try 3, 8 and 4"
            )

    @property
    def hashes(self) -> int:
        """Rows of the table that a token reads."""
        return (self.longest - 1) * self.heads

    @property
    def width(self) -> int:
        """Channels that a token reads, all rows together."""
        return self.hashes * self.table.width

    @property
    def channels(self) -> int:
        """Channels of all streams."""
        return self.streams * self.hidden

    @property
    def dilation(self) -> int:
        """Tokens from a tap of the convolution to the next."""
        return self.longest

    @property
    def span(self) -> int:
        """Tokens that the convolution looks at, with those between its taps."""
        return (self.taps - 1) * self.dilation + 1

    def params(self, hidden: int) -> int:
        """Without the table, of which a token reads a few rows; its three norms less one stream's, which is its
        block's."""
        matrices = self.width * (self.channels + hidden)
        return matrices + self.channels * (self.taps + 3) - hidden

    def states(self) -> tuple[State, ...]:
        """Ids of the last tokens, and what they gave to the convolution."""
        ids = Array("ids", (1,), "float32")
        return WindowRing(ids, self.longest), WindowRing(Array("given", (self.channels,)), self.span)
