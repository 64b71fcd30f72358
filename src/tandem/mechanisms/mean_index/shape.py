"""Which tokens a token looks at, where blocks of tokens have one key: the mean of theirs."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope
from tandem.spec.state import STEPS_AT_ONCE, Array, Pages, State, WindowRing


@dataclass(frozen=True, slots=True)
class MeanIndex:
    """Indexer over a token and all before it (Qwen3.8-Flash-Next): the `budget` best, by whole blocks of `pool` tokens.

    A block has one key, once its last token is there: the mean of its tokens' keys, normed, and turned as its first
    token is. Its score for a token is the sum of what small heads of queries say, as far as they are positive. Tokens
    behind the last whole block are always looked at.
    """

    heads: int
    dim: int  # of a head, and of the key that all share; the first `rope.dims` channels turn
    budget: int
    rope: Rope
    norm: Norm  # of a head's query, and of a key
    pool: int = 4

    def __post_init__(self) -> None:
        if self.pool < 2 or self.budget < self.pool or self.budget % self.pool:
            raise ConfigError(
                f"config.json: indexer_compress_ratio {self.pool} does not divide indexer_budget {self.budget} into "
                "blocks of several tokens; try 4 and 2048"
            )
        if self.rope.dims > self.dim:
            raise ConfigError(
                f"config.json: {self.rope.dims} rotary channels do not fit into indexer_head_dim {self.dim}"
            )

    @property
    def most(self) -> int:
        """Tokens that a row looks at, at most."""
        return self.budget + self.pool - 1

    def params(self, hidden: int) -> int:
        return hidden * (self.heads + 1) * self.dim

    def states(self) -> tuple[State, ...]:
        """States of an open block's tokens, then the keys of whole ones."""
        block = WindowRing(Array("block", (self.dim,)), self.pool, STEPS_AT_ONCE)
        return block, Pages((Array("index", (1, self.dim)),), self.pool)
