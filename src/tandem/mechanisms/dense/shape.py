"""Dense feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.spec.activation import SILU, Activation
from tandem.spec.state import State


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward that every token uses."""

    width: int
    activation: Activation = SILU

    def params(self, hidden: int) -> int:
        return self.activation.matrices * hidden * self.width

    def states(self) -> tuple[State, ...]:
        return ()
