"""`Drafter`: who drafts what comes next in a sequence."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol, runtime_checkable

from tandem.engine.sequence import Sequence

LAYER_KINDS = 64  # of a draft layer's tokens: this, and how many come before


class Draft(NamedTuple):
    """Tokens that may follow a sequence's last one, in order. kinds: of each, how good its evidence is, given that
    those before it are accepted. Tokens of one kind are accepted about as often as each other. More kinds than tokens:
    those could be drawn, at a cost. confidences: how likely whoever made a token calls it; (): it does not say."""

    tokens: tuple[int, ...]
    kinds: tuple[int, ...]
    confidences: tuple[float, ...] = ()


class Drafter(Protocol):
    """Nothing that it says can make an answer wrong."""

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """At most so many tokens. None: it has no idea."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...


@runtime_checkable
class ConfidenceDrafter(Protocol):
    """A `BatchDrafter` that says how likely its draft tokens are."""

    def confidences(self, sequence: Sequence) -> tuple[float, ...]:
        """Probability of each draft token that was drawn last, if those before it are accepted; (): not known."""
        ...


@runtime_checkable
class BatchDrafter(Protocol):
    """A `Drafter` whose draft tokens cost time, so that only those are drawn that get a row."""

    def draw(self, requests: Rows[tuple[Sequence, int]]) -> Rows[tuple[int, ...]]:
        """So many draft tokens of each sequence, which has pages for them; none of one that is not ready yet."""
        ...

    def behind(self, sequence: Sequence) -> int:
        """Rows that drawing its draft tokens has to make first."""
        ...

    @property
    def unusual(self) -> bool:
        """Whether the last call did more than a usual one: its time says nothing."""
        ...
