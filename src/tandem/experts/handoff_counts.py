"""Sizes and counters of a hand-off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class HandoffSizes:
    """mailbox_tokens: of the largest graph; tokens: of the largest step; deferred: experts may be, in graphs."""

    mailbox_tokens: int
    tokens: int
    hidden: int
    top_k: int
    deferred: bool = False


class HandoffTimes(NamedTuple):
    """Batches handed to the CPU, and its time: waiting until they came, and computing them."""

    posts: int = 0
    wait_seconds: float = 0.0
    serve_seconds: float = 0.0

    def plus(self, other: HandoffTimes) -> HandoffTimes:
        return HandoffTimes(
            self.posts + other.posts,
            self.wait_seconds + other.wait_seconds,
            self.serve_seconds + other.serve_seconds,
        )


class PrefetchCounts(NamedTuple):
    """Experts in CPU memory that were foreseen, each once per post; of those, that the post asked for; bytes of
    foreseen experts that were fetched before they were computed."""

    hinted: int = 0
    hits: int = 0
    nbytes: int = 0
