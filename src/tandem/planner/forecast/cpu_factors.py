"""`CpuFactors`: how much longer than at the start the CPU takes for a layer's experts, by size of steps, from steps.

A size is a power of two. What one has shown is taken for others, until they show their own. A CPU is never faster by
chance, so what is faster counts at once. It may be slower by chance, so what is slower counts when the next step
confirms it. A CPU that was left out of steps is not measured: now and then it gets a small part, more and more seldom
while that is too slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

FASTEST, SLOWEST = 0.125, 8.0
NEWEST = 0.3  # of what is known, that one more step tells
NEAR = 1.25  # times that differ by less differ by chance
ONCE = 1.2  # times as slow as known: what a single slow step is believed
FALL = 0.4  # of what is known, least that a single step is believed: its prompt may repeat a few words
ALIKE = 7  # smallest size that others tell about: steps of fewer rows do not use all experts
FIRST_WAIT, SECOND_WAIT, MOST_WAIT = 1, 4, 32  # steps that leave the CPU out before one tries it
RESTORED = 8  # steps in a row in which the CPU has a part, after which it is tried as soon as at first


@dataclass(slots=True)
class _Size:
    factor: float | None = None  # None: no step has shown it
    newest: float = 1.0  # of the last step
    steps: int = 0  # with a part of the CPU, since one without
    left_out: int = 0  # steps without one, since
    wait: int = FIRST_WAIT


@dataclass(slots=True)
class CpuFactors:
    """The CPU's time ÷ the start's."""

    _sizes: dict[int, _Size] = field(default_factory=dict)

    def of(self, rows: int) -> float:
        """For a step of so many rows."""
        size = rows.bit_length()
        own = self._sizes.get(size)
        if own is not None and own.factor is not None:
            return own.factor
        known = {at: each.factor for at, each in sorted(self._sizes.items()) if at >= ALIKE and each.factor is not None}
        if size < ALIKE or not known:
            return 1.0
        return float(np.interp(size, list(known), list(known.values())))

    def learn(self, rows: int, ratio: float) -> None:
        """The CPU took so many times as long as at the start, in a step of so many rows."""
        known, each = self.of(rows), self._sizes.setdefault(rows.bit_length(), _Size())
        before, each.newest = known if each.factor is None else each.newest, min(SLOWEST, max(FASTEST, ratio))
        each.factor = _corrected(known, before, each.newest, each.steps == 0)
        each.steps += 1
        if each.steps >= RESTORED or each.newest < known / NEAR:
            each.wait = FIRST_WAIT
        elif each.left_out:
            each.wait = min(MOST_WAIT, max(SECOND_WAIT, 2 * each.wait))
        each.left_out = 0

    def leave_out(self, rows: int) -> None:
        """The CPU had no part in a step of so many rows."""
        each = self._sizes.setdefault(rows.bit_length(), _Size())
        each.left_out, each.steps = each.left_out + 1, 0

    def tries(self, rows: int) -> bool:
        """True where it gets one in the next step of so many rows, although it seems too slow."""
        each = self._sizes.get(rows.bit_length())
        return each is not None and each.left_out >= each.wait


def _corrected(known: float, before: float, newest: float, first: bool) -> float:
    """The factor after one more step. before: of the last one; first: nothing was measured for long."""
    if known / NEAR <= newest <= known * NEAR:
        return known + (0.5 if first else NEWEST) * (newest - known)
    if newest > known:
        return min(before, newest) if before > known * NEAR else known * ONCE
    if first:
        return max(newest, FALL * known)
    return max(before, newest) if before < known / NEAR else (known + newest) / 2
