"""`Drafter`: who guesses what comes next in a sequence."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tandem.engine.sequence import Sequence


class Draft(NamedTuple):
    """Tokens that may follow a sequence's last one, in order. kinds: of each, how good its evidence is, given that
    those before it come: guesses of one kind come about as often as each other."""

    tokens: tuple[int, ...]
    kinds: tuple[int, ...]


class Drafter(Protocol):
    """Nothing that it says can make an answer wrong."""

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """At most so many tokens. None: it has no idea."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...
