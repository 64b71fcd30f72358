"""`LivePolicy`: which experts should change places, from how often each was read. Pure data in, exchanges out.

Two virtual placements count what moving would gain (`experts/live/virtual.py`). "Fast" forgets within a hundred steps
and follows what is hot now. "Slow" remembers thousands and moves only what is clear of luck. Each has a net: the reads
that the GPU would have saved over the placement at the start ("home"), less what its exchanges would have cost.

The real placement follows the one whose net is clearly ahead: by more than luck could give to a placement that differs
in as many experts. It goes home where neither is. So with uniform routing nothing ever moves. Its exchanges may cost a
share of all reads, and at most `bytes_per_step` move. A decision moves one expert per layer at most: a layer has one
spare place, so its exchanges follow each other.

At home decisions become rare while no virtual placement gains more than luck gives: the next one comes after a quarter
of the steps in which that was so (`_Calm`). One decision that sees more makes them frequent again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import log, sqrt

import numpy as np
import torch
from torch import Tensor

from tandem import _core
from tandem.experts.live.virtual import (
    COME,
    LEAVE,
    STAY,
    Decided,
    Exchange,
    Floats,
    Habits,
    Marks,
    VirtualPlacement,
)
from tandem.experts.residency import Location, Residency
from tandem.experts.usage.expert_usage import Counted

_log = logging.getLogger(__name__)

HOME = -1  # in place of the number of a virtual placement
LONGEST_INTERVAL = 4  # times `interval_steps`
CALM_SHARE = 4  # of the steps in which nobody gained more than luck, one part in so many passes until the next decision
QUIET = 16  # a decision that moves an expert of fewer than one layer in so many makes the next interval twice as long
FAST = Habits(half_life=32, horizon=64, spends=0.15, factor=1.25)
ANY = float(np.finfo(np.float32).min)  # gain that every exchange has
SLOW = Habits(half_life=1024, horizon=1024 / log(2), spends=0.05, luck=1.0)


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Steps, unless said otherwise. Tuned on traces of `bench.placement.traces` with seeds that no test uses."""

    habits: tuple[Habits, ...] = field(default=(FAST, SLOW))  # of the virtual placements
    net_half_life: float = 512.0  # of what they have gained
    clear: float = 4.0  # standard deviations of luck, by which the one that is followed is ahead
    invested: float = 0.25  # of what the exchanges up to there cost, by which it is ahead as well
    worth: float = 0.5  # of the gain that pays for an exchange, that a real one still promises
    least_steps: int = 32  # before anybody is followed
    spends: float = 0.15  # share of all reads that real exchanges may cost
    dwell_steps: int = 32  # that a newcomer stays at least
    interval_steps: int = 4  # between two decisions
    bytes_per_step: int = 48 << 20  # both directions together: 0.9 ms of PCIe 5 x16, less once it has settled
    stirs: float = 3.0  # standard deviations of luck: what one decision gains beyond them is a change of routing
    longest_rest: int = 192  # between two decisions at home


class _Net:
    """Reads gained over home, less what exchanges cost; and what luck gives to it: a variance."""

    def __init__(self) -> None:
        self.reads = self.variance = 0.0

    def add(self, keep: float, gained: float, variance: float) -> None:
        self.reads = self.reads * keep + gained
        self.variance = self.variance * keep * keep + variance


_NO_NET = _Net()  # home's


class _Calm:
    """Steps at home in which no virtual placement has gained more than luck gives. Costs of exchanges do not count
    here: a placement that has just begun to move has paid, and gained little yet."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings, self._steps, self._stirred = settings, 0, False

    @property
    def interval_steps(self) -> int:
        """Until the next decision, at least."""
        return min(self._steps // CALM_SHARE, self._settings.longest_rest)

    def see(self, decided: Decided) -> None:
        """One virtual placement's decision."""
        luck = sqrt(decided.reads * decided.displaced)
        self._stirred |= decided.gained > self._settings.stirs * luck

    def ended(self, at_home: bool, reads: int, steps: int) -> None:
        """A decision about so many reads in so many steps. Without reads nothing is known. at_home: nobody is away, nor
        on the way."""
        if self._stirred or not at_home:
            self._steps = 0
        elif reads:
            self._steps += steps
        self._stirred = False


class LivePolicy:
    """residency: where each routed expert is, which `done` and `stranded` change. Experts in their file, those that
    must not move, and layers that have none on one of both sides are simply never exchanged."""

    def __init__(
        self, residency: Residency, expert_bytes: float, reads_per_exchange: float, settings: PolicySettings
    ) -> None:
        """reads_per_exchange: cost of an exchange, in reads of an expert from CPU memory; may be set later, too."""
        self.settings, self.cost, self.residency = settings, reads_per_exchange, residency
        resident = residency.on(Location.GPU)
        self._home_counts: Floats = resident.astype(np.float32)  # those at home are the hottest, on the way home
        movable = np.where(resident, LEAVE, np.where(residency.on(Location.CPU), COME, STAY)).astype(np.int8)
        self._virtual = [
            VirtualPlacement(residency.slots, movable, habits, settings.dwell_steps)
            for habits in settings.habits
        ]
        self._nets = [_Net() for _ in self._virtual]
        self._away: Marks = np.zeros_like(movable)  # on the GPU but not at home: 1; the other way: -1
        self._idle = (movable != STAY).astype(np.int8)  # 0: stays where it is, or is under way
        self._unused: Marks = np.zeros_like(movable)
        self._ended: set[int] = set()  # layers
        per_decision = settings.bytes_per_step * settings.interval_steps / (2 * expert_bytes)
        self._allowance, self._per_decision, self._credit = 0.0, per_decision, 0.0
        self._step, self._pace, self._at_home_since, self._steps = 0, 1, 0, 0
        self._reads = 0  # between the last two looks
        self._at_home, self._under_way = True, 0  # whether nobody is away; exchanges
        self._undecided: list[tuple[VirtualPlacement, _Net]] = []  # of this decision
        self._moved = 0  # virtual exchanges of this decision
        self._calm = _Calm(settings)
        self.followed = HOME
        self.rests = 0
        """How many times it went home because moving did not pay."""
        self.passes = 0
        """How many times all experts were passed over, since the start."""
        self.decisions = 0
        """How many there were, since the start."""

    @property
    def resting(self) -> bool:
        """Whether nothing moves but what goes home."""
        return self.followed == HOME

    @property
    def interval_steps(self) -> int:
        """Until the next decision: longer while little or nothing moves, for looking takes as long and brings less."""
        at_home = self.resting and self._step - self._at_home_since > 2 * self.settings.net_half_life
        steps = self.settings.interval_steps * (LONGEST_INTERVAL if at_home else self._pace)
        return max(steps, self._calm.interval_steps)

    @property
    def slot_of(self) -> Tensor:
        """int64 [layers, experts]: the placement, as far as exchanges were `done`."""
        return torch.from_numpy(self.residency.slots)

    @property
    def beside(self) -> list[_core.Meanwhile]:
        """Work of all decisions that is done in pieces while steps run."""
        return [virtual.beside for virtual in self._virtual if virtual.beside is not None]

    def start(self, reads: Counted) -> None:
        """Reads before this do not count."""
        for virtual in self._virtual:
            virtual.start(reads)

    def observe(self, reads: Counted, steps: int) -> None:
        """`look` and all that follows it, at once."""
        for decision in self.look(reads, steps):
            while decision.next():
                pass
        self.looked()

    def look(self, reads: Counted, steps: int) -> list[_core.Meanwhile]:
        """reads int32 or int64 [layers, experts]: steps since ever in which each was read, `steps` more than the last
        time; kept and unchanged until `looked`. What passes over all experts is done in pieces, in the course of a
        step, and by `decide` what is left."""
        self._step, self._steps = self._step + steps, steps
        self._undecided, self._moved = list(zip(self._virtual, self._nets, strict=True)), 0
        self.passes, self.decisions = self.passes + len(self._virtual), self.decisions + 1
        return [virtual.look(reads, steps, self.cost) for virtual in self._virtual]

    def decide(self) -> bool:
        """One step of a decision, after `look`; whether others follow. The last one says whom to follow."""
        if not self._undecided:
            return False
        virtual, net = self._undecided.pop(0)
        decided = virtual.decide(self.cost)
        self._reads, exchanges = decided.reads, len(decided.exchanges)
        keep = 0.5 ** (self._steps / self.settings.net_half_life)
        net.add(keep, decided.gained - self.cost * exchanges, decided.reads * decided.displaced)
        self._moved += exchanges
        self._calm.see(decided)
        if self._undecided:
            return True
        self._pace = 1 if self._moved * QUIET > len(self._away) else min(2 * self._pace, LONGEST_INTERVAL)
        self._choose()
        self._calm.ended(self._at_home, self._reads, self._steps)
        self._earn()
        return False

    def looked(self) -> None:
        """All steps of a decision that are left."""
        while self.decide():
            pass

    def _choose(self) -> None:
        """Whom to follow from now on."""
        if self._step < self.settings.least_steps:
            return
        best = max(range(HOME, len(self._nets)), key=lambda number: self._net(number).reads)
        ahead, behind = self._net(best), self._net(self.followed)
        if best == self.followed or ahead.reads <= behind.reads:
            return
        lead = ahead.reads - behind.reads - self.settings.clear * sqrt(ahead.variance + behind.variance)
        if lead > 0 and lead > self.settings.invested * self._newcomers(best) * self.cost:
            self._follow(best, ahead.reads, behind.reads)

    def _net(self, number: int) -> _Net:
        return _NO_NET if number == HOME else self._nets[number]

    def _newcomers(self, number: int) -> int:
        """Experts that are on the GPU there and not here."""
        goal = 0 if number == HOME else self._virtual[number].better
        return int((self._away < goal).sum())

    def _follow(self, number: int, reads: float, before: float) -> None:
        names = "the placement at the start", *(f"half-life {v.half_life:g}" for v in self.settings.habits)
        _log.info(
            "live placement follows %s, after %s: %.0f against %.0f reads of experts saved lately",
            names[number + 1], names[self.followed + 1], reads, before,
        )  # fmt: skip
        self.rests += number == HOME
        self.followed, self._at_home_since, self._at_home = number, self._step, False

    def _earn(self) -> None:
        limit, steps = max(1.0, self._per_decision), self._steps
        self._allowance = min(self._allowance + self._per_decision * steps / self.settings.interval_steps, limit)
        earned = self.settings.spends * self._reads / max(self.cost, 1e-9)
        self._credit = min(self._credit + earned, float(len(self._away)))

    def next_exchanges(self) -> list[Exchange]:
        """Exchanges to make now, most worthwhile first; each is under way until `done` or `dropped`."""
        room = int(min(self._allowance, self._credit))
        if room == 0 or self._at_home:
            return []
        self.passes += 1
        scores, goal, least_gain = self._home_counts, None, ANY
        if not self.resting:
            scores, goal = self._virtual[self.followed].counts, self._virtual[self.followed].better
            least_gain = self.settings.worth * self.settings.habits[self.followed].least_gain(self.cost)
        arrays, rules = (scores, self._away, goal, self._idle, self.residency.slots), (least_gain, -1.0, 0.0)
        picks = [Exchange(*each) for each in _core.pick_towards(*arrays, rules, room)]
        self._under_way += len(picks)
        self._at_home = self.resting and not self._under_way
        self._allowance -= len(picks)
        self._credit -= len(picks)
        return picks

    def done(self, *exchanges: Exchange) -> None:
        _core.note_exchanges(exchanges, self.residency.slots, self._away, self._unused)
        for exchange in exchanges:
            self._unlock(exchange)

    def dropped(self, exchange: Exchange) -> None:
        """It was not made: everything is where it was."""
        self._unlock(exchange)

    def stranded(self, exchange: Exchange) -> None:
        """The leaving expert is in CPU memory, and so is the other; the slot is lost."""
        self.residency.sink(exchange.layer, exchange.leaving)
        self._away[exchange.layer, exchange.leaving] -= 1
        self._unlock(exchange)

    def _unlock(self, exchange: Exchange) -> None:
        layer, _, leaving, coming = exchange
        self._under_way -= 1
        self._idle[layer, leaving] = self._idle[layer, coming] = 1
        if layer in self._ended:
            self.ended(layer)

    def ended(self, layer: int) -> None:
        """Nothing can move there any more; it stays as it is, and nobody counts what moving would gain there."""
        self._ended.add(layer)
        self._idle[layer] = 0
        for virtual in self._virtual:
            virtual.freeze(layer, self.residency.slots[layer], self._away[layer])
