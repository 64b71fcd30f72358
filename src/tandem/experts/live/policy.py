"""`LivePolicy`: which experts should change places, from how often each was used. Pure data in, exchanges out.

An expert in CPU memory takes the slot of the coldest one of its layer when its decayed count says that this pays. It
must have been used twice and beat the other by a factor. The difference, if it lasts for `horizon_tokens`, must save
more reads than the exchange costs. A newcomer stays for a while. A decision moves one expert per layer at most (a layer
has one spare place, so its exchanges follow each other), and at most `bytes_per_step` move.

It also knows what the placement that it began with ("home") would have hit, so each window of tokens says what moving
has gained. A window whose exchanges cost more than that ends the moving; it is tried again after a pause that doubles
each time. While resting, a placement that does worse than home goes back there, if that pays.

A decision looks at all experts, 48 x 512 of them, while everything may stand still. The arrays have left the caches by
then. So they are few and small, C++ passes over each once (`csrc/experts/live/use_counts.h`), and no layer is sorted.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem import _core
from tandem.experts.residency import Residency, Tier
from tandem.experts.usage.expert_usage import Counted

_log = logging.getLogger(__name__)

LONGEST_INTERVAL = 4  # times `interval_steps`
QUIET = 16  # a decision that moves an expert of fewer than one layer in so many makes the next interval twice as long

STAY, LEAVE, COME = range(
    3
)  # what an expert may do: those that leave are on the GPU, and those that come are not
Floats = npt.NDArray[np.float32]


class Exchange(NamedTuple):
    """`leaving` is in `slot` of the layer's GPU slots, `coming` in CPU memory; they are to change places."""

    layer: int
    slot: int
    leaving: int
    coming: int


class _Look(NamedTuple):
    """At the uses of so many tokens, which took so many steps."""

    decision: _core.UseDecision
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Tokens, unless said otherwise. Tuned on traces of `live_traces.Zipf` with seeds that no test uses."""

    half_life: float = 32.0  # of counts
    horizon_tokens: float = 64.0  # how long a difference is expected to last
    factor: float = 1.25  # by which a newcomer's count beats the one that leaves
    touches: float = 1.5  # least decayed count of a newcomer: more than one use
    dwell_steps: int = 32  # that a newcomer stays at least
    interval_steps: int = 4  # between two decisions
    bytes_per_step: int = 48 << 20  # both directions together: 0.9 ms of PCIe 5 x16, less once it has settled
    window: int = 64  # after which the gain is judged
    shortest_rest: int = 16  # windows that moving pauses when it did not pay; doubles each time
    longest_rest: int = 256

    def decay(self, tokens: int) -> float:
        """Share of a count that is left after so many tokens."""
        return float(0.5 ** (tokens / self.half_life))

    def rules(self, cost: float) -> tuple[float, float, float]:
        """Rules for `pick_exchanges`, where an exchange costs so many reads."""
        lifetime = self.horizon_tokens / (self.half_life / log(2))
        return cost / lifetime, self.factor - 1, self.touches


class LivePolicy:
    """residency: where each routed expert is, which `done` and `stranded` change. Experts in their file, those that
    must not move, and layers that have none on one of both sides are simply never exchanged."""

    def __init__(
        self, residency: Residency, expert_bytes: float, reads_per_exchange: float, settings: PolicySettings
    ) -> None:
        self.settings, self._cost, self.residency = settings, reads_per_exchange, residency
        resident = residency.on(Tier.GPU)
        self._home: Floats = resident.astype(np.float32)
        self._better = np.zeros(self._home.shape, np.int8)  # here but not at home: 1; the other way: -1
        self._counts: Floats = np.zeros_like(self._home)
        self._may = np.where(resident, LEAVE, np.where(residency.on(Tier.CPU), COME, STAY)).astype(np.int8)
        self._ended: set[int] = set()  # layers
        # Step after which those may leave that came.
        self._young: deque[tuple[int, tuple[Exchange, ...]]] = deque()
        per_decision = settings.bytes_per_step * settings.interval_steps / (2 * expert_bytes)
        self._allowance, self._per_decision = 0.0, per_decision
        self._step, self._pace = 0, 1
        self._look: _Look | None = None
        self._judge = _Judge(settings, reads_per_exchange)

    @property
    def cost(self) -> float:
        """Cost of an exchange, in reads of an expert from CPU memory."""
        return self._cost

    @cost.setter
    def cost(self, reads: float) -> None:
        self._cost = self._judge.cost = reads

    @property
    def resting(self) -> bool:
        """Whether moving did not pay and is paused."""
        return self._judge.rest > 0

    @property
    def rests(self) -> int:
        """How many times it was paused."""
        return self._judge.rests

    @property
    def interval_steps(self) -> int:
        """Until the next decision: longer while little or nothing moves, for looking takes as long and brings less."""
        return self.settings.interval_steps * (LONGEST_INTERVAL if self.resting else self._pace)

    @property
    def slot_of(self) -> Tensor:
        """int64 [layers, experts]: the placement, as far as exchanges were `done`."""
        return torch.from_numpy(self.residency.slots)

    def observe(self, counts: Counted, tokens: int, steps: int) -> None:
        """counts int32 or int64 [layers, experts]: uses in the last `tokens` tokens, which took `steps` steps."""
        self._step += steps
        gained = _core.add_uses(self._counts, counts, None, self._better, self.settings.decay(tokens))
        self._note(gained, tokens, steps)
        self._grow_up()

    def look(self, counts: Counted, previous: Counted, tokens: int, steps: int) -> _core.Meanwhile:
        """As `observe`, of counts since ever; `previous`, those of the last time, become these. What passes over all
        experts is done in pieces, in the course of a step, and by `looked` what is left."""
        self._step += steps
        self._grow_up()
        arrays = self._counts, counts, previous, self._better, self._may, self.residency.slots
        rules = self.settings.decay(tokens), *self.settings.rules(self._cost)
        self._look = _Look(_core.UseDecision(*arrays, *rules), tokens, steps)
        return self._look.decision

    def looked(self) -> None:
        """Before `wanted`."""
        if self._look is not None:
            decision, tokens, steps = self._look
            self._note(decision.gained(), tokens, steps)
            self._grow_up()  # resting, all may leave

    def _note(self, gained: float, tokens: int, steps: int) -> None:
        if self._judge.observe(gained, tokens):
            self._allowance = 0.0
        self._allowance = min(
            self._allowance + self._per_decision * steps / self.settings.interval_steps,
            max(1.0, self._per_decision),
        )

    def _grow_up(self) -> None:
        while self._young and (self.resting or self._young[0][0] <= self._step):
            for layer, _, _, expert in self._young.popleft()[1]:
                self._may[layer, expert] = STAY if layer in self._ended else LEAVE

    def wanted(self) -> list[Exchange]:
        """Exchanges to make now, most worthwhile first; each is under way until `done` or `dropped`."""
        room, look, self._look = int(self._allowance), self._look, None
        if room == 0 or (self.resting and not self._going_home()):
            return []
        picks = self._best(room) if look is None or self.resting else look.decision.picked(room)
        picks = [each for each in picks if each[0] not in self._ended]  # since it was looked at
        self._pace = 1 if len(picks) * QUIET > len(self._home) else min(2 * self._pace, LONGEST_INTERVAL)
        self._allowance -= len(picks)
        return list(map(Exchange._make, picks))

    def done(self, *exchanges: Exchange) -> None:
        _core.note_exchanges(exchanges, self.residency.slots, self._better, self._may)
        for layer in self._ended.intersection(exchange.layer for exchange in exchanges):
            self._may[layer] = STAY
        self._young.append((self._step + self.settings.dwell_steps, exchanges))
        self._judge.exchanges += len(exchanges)

    def dropped(self, exchange: Exchange) -> None:
        """It was not made: everything is where it was."""
        layer, _, leaving, coming = exchange
        if layer not in self._ended:
            self._may[layer, leaving], self._may[layer, coming] = LEAVE, COME

    def stranded(self, exchange: Exchange) -> None:
        """The leaving expert is in CPU memory, and so is the other; the slot is lost."""
        layer, _, leaving, _ = exchange
        self.residency.sink(layer, leaving)
        self._better[layer, leaving] -= 1

    def ended(self, layer: int) -> None:
        """Nothing can move there any more; it stays as it is."""
        self._ended.add(layer)
        self._may[layer] = STAY

    def _going_home(self) -> bool:
        displaced = int((self._better > 0).sum())
        return self._judge.loss * self.settings.shortest_rest > displaced * self._cost > 0

    def _best(self, room: int) -> list[tuple[int, int, int, int]]:
        resting = self._home, (1.0, 0.0, 1.0)
        scores, rules = resting if self.resting else (self._counts, self.settings.rules(self._cost))
        return _core.pick_exchanges(scores, self._may, self.residency.slots, *rules, room)


class _Judge:
    """Adds up, window by window, what moving has gained over home, and what it has cost, in reads of experts."""

    def __init__(self, settings: PolicySettings, cost: float) -> None:
        self._settings, self.cost = settings, cost
        self._gained, self._tokens, self.exchanges = 0.0, 0, 0
        self._next_rest = settings.shortest_rest
        self.rest = 0  # windows left
        self.rests = 0
        self.loss = 0.0  # of the last window while resting, against home

    def observe(self, gained: float, tokens: int) -> bool:
        """Whether resting began or ended."""
        self._gained += gained
        self._tokens += tokens
        if self._tokens < self._settings.window:
            return False
        before = self.rest > 0
        self._judge()
        self._gained, self._tokens, self.exchanges = 0.0, 0, 0
        return before != (self.rest > 0)

    def _judge(self) -> None:
        if self.rest:
            self.rest -= 1
            self.loss = -self._gained
        elif self._gained < self.exchanges * self.cost:
            self._begin_rest()
        elif self.exchanges:
            self._next_rest = max(self._settings.shortest_rest, self._next_rest // 2)

    def _begin_rest(self) -> None:
        self.rest, self.loss = self._next_rest, 0.0
        self.rests += 1
        self._next_rest = min(2 * self._next_rest, self._settings.longest_rest)
        _log.info(
            "live placement rests for %d tokens: %d exchanges gained %.0f reads of experts and cost as much as %.0f",
            self.rest * self._settings.window, self.exchanges, self._gained, self.exchanges * self.cost,
        )  # fmt: skip
