"""`Decision`: a line of the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """One resolved choice: what was chosen, and why (a measured fact, a flag, a limit)."""

    name: str
    value: str
    reason: str


Decisions = tuple[Decision, ...]
