"""`RankShard`: which of several equal ranks a process is. A rank holds a part of every matrix, or a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.errors import ConfigError

ALL = slice(None)
MOST_RANKS = 64


class Share(NamedTuple):
    """Rows or columns [first, first + size) of `whole`."""

    whole: int
    first: int
    size: int

    @property
    def cut(self) -> slice:
        return ALL if self.size == self.whole else slice(self.first, self.first + self.size)


Size = int | Share | tuple[Share, ...]
"""Rows that a rank has: all of a matrix, some, or some of each of its sections, which lie one behind the other."""


@dataclass(frozen=True, slots=True)
class RankShard:
    """Rank `rank` of `ranks`."""

    rank: int = 0
    ranks: int = 1

    @property
    def first(self) -> bool:
        """Whether it adds what is to be added once: biases of sums."""
        return self.rank == 0

    def share(self, size: int, copies: int = 1) -> Share:
        """Its own `size`, where `copies` neighbouring ranks have the same ones."""
        return Share(self.ranks // copies * size, self.rank // copies * size, size)

    def rows_of(self, whole: int) -> Share:
        """Its own of `whole`, which need not be divisible: the last rank has fewer."""
        each = -(-whole // self.ranks)
        first = min(whole, self.rank * each)
        return Share(whole, first, min(each, whole - first))


ALONE = RankShard()


def whole_of(size: Size) -> int:
    """How many the checkpoint has."""
    if isinstance(size, int):
        return size
    return size.whole if isinstance(size, Share) else sum(each.whole for each in size)


def cuts_of(size: Size) -> list[slice]:
    """Which of them are the rank's: one piece, or one of each section."""
    if isinstance(size, int):
        return [ALL]
    if isinstance(size, Share):
        return [size.cut]
    if all(each.cut == ALL for each in size):
        return [ALL]
    firsts = [sum(each.whole for each in size[:i]) + share.first for i, share in enumerate(size)]
    return [slice(first, first + each.size) for first, each in zip(firsts, size, strict=True)]


def refused(ranks: int, why: str) -> ConfigError:
    """ConfigError about so many ranks, by the flag that asked for them."""
    return ConfigError(f"--tensor-parallel-size {ranks}: {why}", fields=("tensor_parallel_size",))
