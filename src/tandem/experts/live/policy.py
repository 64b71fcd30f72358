"""`LivePolicy`: which experts should change places, from how often each was read. Pure data in, exchanges out.

Two virtual placements count what moving would gain (`experts/live/virtual.py`). "Fast" forgets within a hundred steps
and follows what is hot now. "Slow" remembers thousands and moves only what is clear of luck. Each has a net: the reads
that the GPU would have saved over the placement at the start ("home"), less what its exchanges would have cost.

The real placement follows the one whose net is clearly ahead: by more than luck could give to a placement that differs
in as many experts. It goes home where neither is. So with uniform routing nothing ever moves. Its exchanges may cost a
share of all reads, and at most `bytes_per_step` move. A decision moves one expert per layer at most: a layer has one
spare place, so its exchanges follow each other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import log, sqrt

import numpy as np
import torch
from torch import Tensor

from tandem import _core
from tandem.experts.live.virtual import COME, LEAVE, STAY, Exchange, Floats, Habits, Marks, VirtualPlacement
from tandem.experts.residency import Location, Residency
from tandem.experts.usage.expert_usage import Counted

_log = logging.getLogger(__name__)

HOME = -1  # in place of the number of a virtual placement
LONGEST_INTERVAL = 4  # times `interval_steps`
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


class _Net:
    """Reads gained over home, less what exchanges cost; and what luck gives to it: a variance."""

    def __init__(self) -> None:
        self.reads = self.variance = 0.0

    def add(self, keep: float, gained: float, variance: float) -> None:
        self.reads = self.reads * keep + gained
        self.variance = self.variance * keep * keep + variance


_NO_NET = _Net()  # home's


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
        self._total: int | None = None  # reads, by the last look
        self._reads = 0.0
        self._looks = False
        self.followed = HOME
        self.rests = 0
        """How many times it went home because moving did not pay."""
        self.passes = 0
        """How many times all experts were passed over, since the start."""

    @property
    def resting(self) -> bool:
        """Whether nothing moves but what goes home."""
        return self.followed == HOME

    @property
    def interval_steps(self) -> int:
        """Until the next decision: longer while little or nothing moves, for looking takes as long and brings less."""
        at_home = self.resting and self._step - self._at_home_since > 2 * self.settings.net_half_life
        return self.settings.interval_steps * (LONGEST_INTERVAL if at_home else self._pace)

    @property
    def slot_of(self) -> Tensor:
        """int64 [layers, experts]: the placement, as far as exchanges were `done`."""
        return torch.from_numpy(self.residency.slots)

    def start(self, reads: Counted) -> None:
        """Reads before this do not count."""
        self._total = int(reads.sum(dtype=reads.dtype))
        for virtual in self._virtual:
            virtual.start(reads)

    def observe(self, reads: Counted, steps: int) -> None:
        """`look` and `looked` at once."""
        for decision in self.look(reads, steps):
            while decision.next():
                pass
        self.looked()

    def look(self, reads: Counted, steps: int) -> list[_core.Meanwhile]:
        """reads int32 or int64 [layers, experts]: steps since ever in which each was read, `steps` more than the last
        time; kept and unchanged until `looked`. What passes over all experts is done in pieces, in the course of a
        step, and by `looked` what is left."""
        total = int(reads.sum(dtype=reads.dtype))  # which may run over: only the difference counts
        self._reads = float((total - (self._total or 0)) % (1 << 32))
        self._total, self._step, self._steps, self._looks = total, self._step + steps, steps, True
        self.passes += len(self._virtual)
        return [virtual.look(reads, steps, self.cost) for virtual in self._virtual]

    def looked(self) -> None:
        """Before `next_exchanges`."""
        if not self._looks:
            return
        self._looks, moved = False, 0
        keep = 0.5 ** (self._steps / self.settings.net_half_life)
        for virtual, net in zip(self._virtual, self._nets, strict=True):
            variance = self._reads * virtual.share_displaced
            gained, exchanges = virtual.decide(self._reads, self.cost)
            net.add(keep, gained - self.cost * len(exchanges), variance)
            moved += len(exchanges)
        self._pace = 1 if moved * QUIET > len(self._away) else min(2 * self._pace, LONGEST_INTERVAL)
        self._choose()
        self._earn()

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

    def _ahead(self, number: int) -> Marks:
        """Difference from the placement `number`: 1 who is on the GPU only here, -1 who is there only."""
        return self._away if number == HOME else self._away - self._virtual[number].better

    def _newcomers(self, number: int) -> int:
        """Experts that are on the GPU there and not here."""
        return int((self._ahead(number) < 0).sum())

    def _follow(self, number: int, reads: float, before: float) -> None:
        names = "the placement at the start", *(f"half-life {v.half_life:g}" for v in self.settings.habits)
        _log.info(
            "live placement follows %s, after %s: %.0f against %.0f reads of experts saved lately",
            names[number + 1], names[self.followed + 1], reads, before,
        )  # fmt: skip
        self.rests += number == HOME
        self.followed, self._at_home_since = number, self._step

    def _wishes(self) -> Marks:
        """`LEAVE` and `COME`: who is elsewhere than in the placement that is followed, but for those under way."""
        bits = self._ahead(self.followed) & 3  # 0, 1 or 3
        wishes: Marks = (bits ^ (bits >> 1)) * self._idle
        return wishes

    def _earn(self) -> None:
        limit, steps = max(1.0, self._per_decision), self._steps
        self._allowance = min(self._allowance + self._per_decision * steps / self.settings.interval_steps, limit)
        earned = self.settings.spends * self._reads / max(self.cost, 1e-9)
        self._credit = min(self._credit + earned, float(len(self._away)))

    def next_exchanges(self) -> list[Exchange]:
        """Exchanges to make now, most worthwhile first; each is under way until `done` or `dropped`."""
        room = int(min(self._allowance, self._credit))
        if room == 0 or (self.resting and not self._away.any()):
            return []
        self.passes += 1
        scores, least_gain = self._home_counts, ANY
        if not self.resting:
            scores = self._virtual[self.followed].counts
            least_gain = self.settings.worth * self.settings.habits[self.followed].least_gain(self.cost)
        slots, rules = self.residency.slots, (least_gain, -1.0, 0.0)
        picks = [Exchange(*each) for each in _core.pick_exchanges(scores, self._wishes(), slots, *rules, room)]
        for layer, _, leaving, coming in picks:
            self._idle[layer, leaving] = self._idle[layer, coming] = 0
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
        self._idle[layer, leaving] = self._idle[layer, coming] = 1
        if layer in self._ended:
            self.ended(layer)

    def ended(self, layer: int) -> None:
        """Nothing can move there any more; it stays as it is, and nobody counts what moving would gain there."""
        self._ended.add(layer)
        self._idle[layer] = 0
        for virtual in self._virtual:
            virtual.freeze(layer, self.residency.slots[layer], self._away[layer])
