"""Compressed attention: one key per token that is its value, too; a window of last tokens, and entries for many."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.spec.rope import Rope
from tandem.spec.state import Array, Pages, State, WindowRing


@dataclass(frozen=True, slots=True)
class EntryIndex:
    """Chooses the entries that a token sees: sums over `heads` of a weight times max(0, q · k); the best `budget`."""

    heads: int
    dim: int
    budget: int


@dataclass(frozen=True, slots=True)
class Compression:
    """Every `stride` tokens become one entry: sums of their inputs, channel by channel weighted by a softmax of gates.

    overlap: an entry also takes the window before, by inputs and gates of their own. index: of one's own smaller
    entries; None: all entries are seen. A token sees an entry once its last token is there.
    """

    stride: int
    overlap: bool = False
    index: EntryIndex | None = None

    @property
    def series(self) -> int:
        """Series of inputs and gates that every token makes."""
        return 2 if self.overlap else 1

    @property
    def rows(self) -> int:
        """Tokens that an entry is made of."""
        return self.series * self.stride

    def widths(self, dim: int) -> tuple[int, ...]:
        """Channels of an entry, and of an entry of the index."""
        return (dim,) if self.index is None else (dim, self.index.dim)

    def inputs(self, dim: int) -> int:
        """Numbers that a token makes for its entries: inputs and gates."""
        return 2 * self.series * sum(self.widths(dim))


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Heads of queries over one key of `dim` channels for each of the last `window` tokens, and over entries.

    Queries are made from a latent of `q_rank` and normed per head. The last channels of queries and keys turn, and
    those of the result turn back. Every head has a sink. The output is projected in `out_groups` groups of heads to
    `out_rank` channels each, then together.
    """

    heads: int
    dim: int
    q_rank: int
    window: int
    rope: Rope
    out_groups: int
    out_rank: int
    eps: float
    compression: Compression | None = None

    @property
    def scale(self) -> float:
        """Scale of the softmax."""
        return float(self.dim**-0.5)

    @property
    def group_dim(self) -> int:
        """Channels of a group of heads."""
        return self.heads * self.dim // self.out_groups

    @property
    def sees_all(self) -> bool:
        """Whether a token looks back farther than its window."""
        return self.compression is not None

    def keys_seen(self, length: int) -> int:
        """By a token after `length` others: of its window, and entries."""
        entries = 0 if self.compression is None else length // self.compression.stride
        return min(length, self.window) + entries - self.unseen(length)

    def scored_products(self, length: int) -> int:
        """Products of an index that chooses among entries of so many tokens: its heads' queries with their keys."""
        index = None if self.compression is None else self.compression.index
        if self.compression is None or index is None or length // self.compression.stride <= index.budget:
            return 0
        return length // self.compression.stride * index.heads * index.dim

    def unseen(self, length: int) -> int:
        """Entries of so many tokens that an index leaves out."""
        if self.compression is None or self.compression.index is None:
            return 0
        return max(0, length // self.compression.stride - self.compression.index.budget)

    def params(self, hidden: int) -> int:
        q = hidden * self.q_rank + self.q_rank * self.heads * self.dim
        return q + hidden * self.dim + self.head_params + self._compression_params(hidden) + self._out(hidden)

    @property
    def head_params(self) -> int:
        """Weights of the first output matrices, which are numbers however they are stored."""
        return self.heads * self.dim * self.out_rank

    def _out(self, hidden: int) -> int:
        return self.out_groups * self.out_rank * hidden

    def _compression_params(self, hidden: int) -> int:
        if self.compression is None:
            return 0
        index = self.compression.index
        chooses = 0 if index is None else self.q_rank * index.heads * index.dim + hidden * index.heads
        return hidden * self.compression.inputs(self.dim) + chooses

    def states(self) -> tuple[State, ...]:
        """An entry of tokens up to p lies in row p / stride. One that a rejected draft token has closed is seen by
        nobody, and closed again by the token that comes."""
        window = WindowRing(Array("window", (self.dim,)), self.window)
        if self.compression is None:
            return (window,)
        inputs = WindowRing(Array("inputs", (self.compression.inputs(self.dim),)), self.compression.rows)
        names = zip(("entry", "index"), self.compression.widths(self.dim), strict=False)
        return window, inputs, Pages(tuple(Array(n, (w,)) for n, w in names), self.compression.stride)
