"""Modules that are not ours."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.spec.state import State


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a layer does outside its experts, where code that is not ours does it. weights: all of it uses for a token;
    kept: of a sequence between steps."""

    weights: int
    kept: tuple[State, ...]

    def params(self, hidden: int) -> int:
        return self.weights

    def states(self) -> tuple[State, ...]:
        return self.kept
