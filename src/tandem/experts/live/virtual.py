"""`VirtualPlacement`: a placement that moves nothing and only counts what moving would have gained.

Its exchanges are made at once, and cost what a real one costs. So its net says, without a risk, whether such a
placement beats the one at the start ("home"). Where routing is uniform it pays for exchanges that gain nothing, and
nobody follows it.

A decision looks at all experts, 48 x 512 of them, while everything may stand still. The arrays have left the caches by
then. So they are few and small, C++ passes over each once (`csrc/experts/live/use_counts.h`), and no layer is sorted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import log, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem import _core
from tandem.experts.usage.expert_usage import Counted

STAY, LEAVE, COME = range(3)  # what an expert may do: those that leave are on the GPU, and those that come are not
Floats = npt.NDArray[np.float32]
Marks = npt.NDArray[np.int8]
Slots = npt.NDArray[np.int64]


class Exchange(NamedTuple):
    """`leaving` is in `slot` of the layer's GPU slots, `coming` in CPU memory; they are to change places."""

    layer: int
    slot: int
    leaving: int
    coming: int


@dataclass(frozen=True, slots=True)
class Habits:
    """When a virtual placement exchanges experts. Steps, unless said otherwise."""

    half_life: float  # of counts
    horizon: float  # how long a difference of counts is expected to last
    spends: float  # share of all reads that exchanges may cost
    luck: float = 0.0  # standard deviations of both counts, by which the difference must be larger
    factor: float = 1.0  # by which a newcomer's count beats the one that leaves
    touches: float = 1.5  # least decayed count of a newcomer: more than one use

    def keep(self, steps: int) -> float:
        """Share of a count that is left after so many steps."""
        return float(0.5 ** (steps / self.half_life))

    def least_gain(self, cost: float) -> float:
        """Difference of counts that pays for an exchange of `cost` reads: they stand for `half_life` / ln 2 steps."""
        return cost * self.half_life / (log(2) * self.horizon)


class VirtualPlacement:
    """`slots`, `better` and `may`: [layers, experts]."""

    def __init__(self, slots: Slots, may: Marks, habits: Habits, dwell: int) -> None:
        """slots: at the start, -1 in CPU memory; may: who may change places; dwell: steps that a newcomer stays."""
        self.slots, self._may, self._habits, self._dwell = slots.copy(), may.copy(), habits, dwell
        self.counts: Floats = np.zeros(slots.shape, np.float32)
        self.better: Marks = np.zeros(slots.shape, np.int8)  # here but not at home: 1; the other way: -1
        self._last_counts: Counted | None = None
        self._young: deque[tuple[int, list[Exchange]]] = deque()  # until a step
        self._step, self._credit = 0, 0.0
        self._decision: _core.UseDecision | None = None
        self._frozen: set[int] = set()  # layers

    @property
    def share_displaced(self) -> float:
        """Share of all experts that are on another side than at home."""
        return int(np.count_nonzero(self.better)) / self.better.size

    def start(self, reads: Counted) -> None:
        """Reads before this do not count."""
        self._last_counts = reads.copy()

    def look(self, reads: Counted, steps: int, cost: float) -> _core.Meanwhile:
        """reads int32 or int64 [layers, experts]: since the start, `steps` more than the last time. What passes over
        all experts is done in pieces, and by `decide` what is left."""
        if self._last_counts is None:
            self._last_counts = np.zeros_like(reads)
        self._step += steps
        self._grow_up()
        habits = self._habits
        self._decision = _core.UseDecision(
            self.counts, reads, self._last_counts, self.better, self._may, self.slots, habits.keep(steps),
            habits.least_gain(cost), habits.factor - 1, habits.touches,
        )  # fmt: skip
        return self._decision

    def decide(self, reads: float, cost: float) -> tuple[float, list[Exchange]]:
        """After `look`, of so many reads. Gain over home since the last time, and who changes places now."""
        decision, self._decision = self._decision, None
        assert decision is not None
        gained = decision.gained()
        self._credit = min(self._credit + self._habits.spends * reads / max(cost, 1e-9), float(len(self.slots)))
        room = int(self._credit)
        picks = [Exchange(*each) for each in decision.picked(len(self.slots) if self._habits.luck else room)]
        if self._frozen:
            picks = [each for each in picks if each.layer not in self._frozen]  # since it was looked at
        exchanges = self._lucky(picks, cost)[:room]
        if len(exchanges) < len(picks):
            self._undo(set(picks).difference(exchanges))
        self._exchange(exchanges)
        return gained, exchanges

    def _lucky(self, picks: list[Exchange], cost: float) -> list[Exchange]:
        """Those whose gain is clear of luck."""
        if not self._habits.luck:
            return picks
        least, luck, count = self._habits.least_gain(cost), self._habits.luck, self.counts.item
        lucky = []
        for each in picks:
            hot, cold = count(each.layer, each.coming), count(each.layer, each.leaving)
            if hot - cold - luck * sqrt(hot + cold) >= least:  # standard deviations, if uses come at random
                lucky.append(each)
        return lucky

    def _exchange(self, exchanges: list[Exchange]) -> None:
        self._credit -= len(exchanges)
        if exchanges:
            _core.note_exchanges(exchanges, self.slots, self.better, self._may)
            self._young.append((self._step + self._dwell, exchanges))

    def _undo(self, picks: Iterable[Exchange]) -> None:
        for layer, _, leaving, coming in picks:
            self._may[layer, leaving], self._may[layer, coming] = LEAVE, COME

    def _grow_up(self) -> None:
        while self._young and self._young[0][0] <= self._step:
            for layer, _, _, expert in self._young.popleft()[1]:
                self._may[layer, expert] = LEAVE

    def freeze(self, layer: int, slots: Slots, better: Marks) -> None:
        """Nothing moves in that layer any more; it is as [experts] say."""
        self._frozen.add(layer)
        self.slots[layer], self.better[layer], self._may[layer] = slots, better, STAY
        self._young = deque(
            (step, [each for each in newcomers if each.layer != layer]) for step, newcomers in self._young
        )
