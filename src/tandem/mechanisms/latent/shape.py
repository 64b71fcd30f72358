"""Attention over one latent per token, of all tokens or of some that an indexer chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.errors import ConfigError
from tandem.mechanisms.token_index.shape import Index
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope
from tandem.spec.state import Array, Pages, State


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries of position p times 1 + beta * log(1 + floor(p / every)), as Llama 4 has it."""

    beta: float
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"queries are scaled every {self.every} positions, which must be at least 1")

    def acts_within(self, positions: int) -> bool:
        """Whether any of the first `positions` is scaled."""
        return self.beta != 0 and positions > self.every


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent and one rotary key per token are kept,
    from which the keys and values of all heads are made."""

    heads: int
    q_rank: int  # queries are made from a latent of this width; 0: straight from the hidden state
    kv_rank: int
    nope_dim: int  # of a query and key head: channels that are not turned …
    rope_dim: int  # … and that are, 0: none; the key's are shared by all heads
    value_dim: int  # of a head
    rope: Rope
    bias: bool = False
    softmax_factor: float = 1.0
    norm: Norm = field(default=Norm(1e-6))
    index: Index | None = None  # a token looks at some others; None: at all before it
    query_scale: QueryScale | None = None
    gate: Literal["none", "head", "channel"] = "none"  # the result times sigmoids of a projection, one for each

    @property
    def gate_rows(self) -> int:
        """Rows of the projection that makes the gate."""
        return self.heads * {"none": 0, "head": 1, "channel": self.value_dim}[self.gate]

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Channels cached for a token: the rotary key, then the latent."""
        return self.rope_dim + self.kv_rank

    @property
    def scale(self) -> float:
        """Scale of the softmax."""
        return float(self.qk_dim**-0.5) * self.softmax_factor

    def params(self, hidden: int) -> int:
        q = hidden * self.q_rank + (self.q_rank or hidden) * self.heads * self.qk_dim
        index = 0 if self.index is None else self.index.params(hidden, self.q_rank)
        out = self.heads * self.value_dim * hidden
        return index + q + hidden * (self.cached_dim + self.gate_rows) + self.head_params + out

    @property
    def head_params(self) -> int:
        """Weights of the matrices that make keys and values of a latent, which are numbers however they are stored."""
        return self.kv_rank * self.heads * (self.nope_dim + self.value_dim)

    @property
    def sees_all(self) -> bool:
        return True

    def visible_tokens(self, context: int) -> int:
        """How many of so many tokens a token looks at."""
        return context if self.index is None else min(context, self.index.most)

    @property
    def scored_channels(self) -> int:
        """Products that a token costs for each before it, where it chooses."""
        index = self.index
        return 0 if index is None or index.reuse is not None else index.heads * index.dim // index.pool

    def states(self) -> tuple[State, ...]:
        latent = Array("latent", (1, self.cached_dim))
        if self.index is None or self.index.reuse is not None:
            return (Pages((latent,)),)
        if self.index.pool > 1:
            return Pages((latent,)), *self.index.states()
        return (Pages((latent, Array("index", (1, self.index.dim)))),)
