"""Modules that are not ours."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.spec.state import State


@dataclass(frozen=True, slots=True)
class Foreign:
    """Work of a layer outside its experts, in code that is not ours. weights: all that a token uses of it; kept: of a
    sequence between steps."""

    weights: int
    kept_states: tuple[State, ...]

    def params(self, hidden: int) -> int:
        return self.weights

    def states(self) -> tuple[State, ...]:
        return self.kept_states
