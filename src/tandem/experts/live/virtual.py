"""`VirtualPlacement`: a placement that moves nothing and only counts what moving would have gained.

Its exchanges are made at once, and cost what a real one costs. So its net says, without a risk, whether such a
placement beats the one at the start ("home"). Where routing is uniform it pays for exchanges that gain nothing, and
nobody follows it.

A decision looks at all experts, 48 x 512 of them, in arrays that have left the caches by then. So they are few and
small, C++ passes over each once while a step runs (`csrc/experts/live/use_decision.h`), and no layer is sorted. Python
does what is done once, for its own bytes are as cold: a call of NumPy takes 10 us.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import log
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


class Decided(NamedTuple):
    """A decision. reads: of all experts since the last one; displaced: share of the experts that were on another side
    than at home meanwhile; gained: reads that the GPU would have had over home; exchanges: who changes places now."""

    reads: int
    displaced: float
    gained: int
    exchanges: list[tuple[int, int, int, int]]


class VirtualPlacement:
    """`slots`, `better` and `may`: [layers, experts]. C++ changes them (`UseDecision`)."""

    def __init__(self, slots: Slots, may: Marks, habits: Habits, dwell: int) -> None:
        """slots: at the start, -1 in CPU memory; may: who may change places; dwell: steps that a newcomer stays."""
        self.slots, self._may, self._habits, self._dwell = slots.copy(), may.copy(), habits, dwell
        self.counts: Floats = np.zeros(slots.shape, np.float32)
        self.better: Marks = np.zeros(slots.shape, np.int8)  # here but not at home: 1; the other way: -1
        self._young: deque[tuple[int, list[tuple[int, int, int, int]]]] = deque()  # until a step
        self._step, self._credit = 0, 0.0
        self._decision: _core.UseDecision | None = None

    @property
    def beside(self) -> _core.Meanwhile | None:
        """Work of all decisions that is done in pieces; None before the first."""
        return self._decision

    def start(self, reads: Counted) -> None:
        """Reads before this do not count."""
        self._decision = _core.UseDecision(self.counts, reads.copy(), self.better, self._may, self.slots)

    def look(self, reads: Counted, steps: int, cost: float) -> _core.Meanwhile:
        """reads int32 or int64 [layers, experts]: since the start, `steps` more than the last time. What passes over
        all experts is done in pieces, and by `decide` what is left."""
        if self._decision is None:
            self.start(np.zeros_like(reads))
        assert self._decision is not None
        self._step += steps
        self._grow_up()
        habits = self._habits
        least = habits.least_gain(cost), habits.factor - 1, habits.touches
        self._decision.begin(reads, habits.keep(steps), *least, habits.luck)
        return self._decision

    def decide(self, cost: float) -> Decided:
        """After `look`."""
        assert self._decision is not None
        reads, gained, displaced = self._decision.sums()
        layers = len(self.slots)
        self._credit = min(self._credit + self._habits.spends * reads / max(cost, 1e-9), float(layers))
        exchanges = self._decision.exchange(int(self._credit))
        if exchanges:
            self._credit -= len(exchanges)
            self._young.append((self._step + self._dwell, exchanges))
        return Decided(reads, displaced / self.better.size, gained, exchanges)

    def _grow_up(self) -> None:
        while self._young and self._young[0][0] <= self._step:
            for layer, _, _, expert in self._young.popleft()[1]:
                self._may[layer, expert] = LEAVE

    def freeze(self, layer: int, slots: Slots, better: Marks) -> None:
        """Nothing moves in that layer any more; it is as [experts] say."""
        self.slots[layer], self.better[layer], self._may[layer] = slots, better, STAY
        self._young = deque(
            (step, [each for each in newcomers if each[0] != layer]) for step, newcomers in self._young
        )
