"""Indexers: which tokens a token looks at."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.spec.rope import Rope
from tandem.spec.state import STEPS_AT_ONCE, Array, Pages, State, WindowRing


@dataclass(frozen=True, slots=True)
class Index:
    """Which tokens a token looks at: of itself and all before it the `budget` best. A token's score for another is the
    weighted sum of what small heads of their own say, as far as it is positive (DeepSeek-V3.2's lightning indexer).

    reuse: the layer whose choice counts here, too; None: this one chooses, and keeps a key of every token. pool: so
    many tokens have one key (GLM-5.3-Flash), a sum of theirs by a softmax of gates, channel by channel. It counts once
    the last of them is there, and stands for all; tokens behind the last whole pool are always looked at.
    """

    heads: int
    dim: int  # of a head, and of the key that all share; the first `rope.dims` channels turn
    budget: int
    rope: Rope
    reuse: int | None = None
    eps: float = 1e-6  # of the keys' norm, which takes away their mean, too
    pool: int = 1

    def __post_init__(self) -> None:
        if self.pool < 1 or self.budget % self.pool:
            raise ConfigError(
                f"config.json: index_kpool {self.pool} does not divide index_topk {self.budget}; try 4 and 2048"
            )

    @property
    def most(self) -> int:
        """Tokens that a row looks at, at most."""
        return self.budget + self.pool - 1

    def params(self, hidden: int, q_rank: int) -> int:
        if self.reuse is not None:
            return 0
        keys = self.dim if self.pool == 1 else 2 * self.dim  # and gates
        return self.heads * (q_rank * self.dim + hidden) + hidden * keys

    def states(self) -> tuple[State, ...]:
        """States of pooled keys: those of an open pool's tokens, then the keys."""
        key = Array("index", (1, self.dim))
        return WindowRing(Array("pool", (2 * self.dim,)), self.pool, STEPS_AT_ONCE), Pages((key,), self.pool)
