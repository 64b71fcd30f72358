"""`LivePolicy`: which experts should change places, from how often each was used. Pure data in, exchanges out.

An expert in CPU memory takes the slot of the coldest one of its layer when its decayed count says that this pays: it
has been used twice, beats the other by a factor, and the difference, if it lasts for `horizon_tokens`, is more reads
saved than the exchange costs. A newcomer stays for a while. At most `bytes_per_step` move.

It also knows what the placement that it began with ("home") would have hit, so each window of tokens says what moving
has gained. A window whose exchanges cost more than that ends the moving; it is tried again after a pause that doubles
each time. While resting, a placement that does worse than home goes back there, if that pays.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

MOST_PER_LAYER = 8  # exchanges of one decision: looking for more takes longer and finds little


class Exchange(NamedTuple):
    """`leaving` is in `slot` of the layer's GPU slots, `coming` in CPU memory; they are to change places."""

    layer: int
    slot: int
    leaving: int
    coming: int


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Tokens, unless said otherwise. Tuned on traces of `live_traces.Zipf` with seeds that no test uses."""

    half_life: float = 32.0  # of counts
    horizon_tokens: float = 64.0  # how long a difference is expected to last
    factor: float = 1.25  # by which a newcomer's count beats the one that leaves
    touches: float = 1.5  # least decayed count of a newcomer: more than one use
    dwell_steps: int = 32  # that a newcomer stays at least
    interval_steps: int = 8  # between two decisions, which take about 0.5 ms at 48 x 512 experts
    bytes_per_step: int = 48 << 20  # both directions together: 0.9 ms of PCIe 5 x16, less once it has settled
    window: int = 64  # after which the gain is judged
    shortest_rest: int = 16  # windows that moving pauses when it did not pay; doubles each time
    longest_rest: int = 256


class LivePolicy:
    """slot_of int [layers, experts]: where each routed expert is at first, -1 in CPU memory. Experts that must not move
    and layers that have none on one of both sides are simply never exchanged."""

    def __init__(
        self, slot_of: Tensor, expert_bytes: float, hits_per_exchange: float, settings: PolicySettings
    ) -> None:
        self.settings, self._cost = settings, hits_per_exchange
        self._slot_of, self._home = slot_of.long().clone(), slot_of >= 0
        self._counts = torch.zeros(slot_of.shape, dtype=torch.float32)
        self._fixed = torch.zeros(slot_of.shape, dtype=torch.bool)  # under way
        self._closed = torch.zeros(len(slot_of), 1, dtype=torch.bool)
        self._came = torch.full(slot_of.shape, -settings.dwell_steps, dtype=torch.long)
        per_decision = settings.bytes_per_step * settings.interval_steps / (2 * expert_bytes)
        self._allowance, self._per_decision = 0.0, per_decision
        self._step = 0
        self._judge = _Judge(settings, hits_per_exchange)

    @property
    def cost(self) -> float:
        """Of an exchange, in reads of an expert from CPU memory."""
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
    def slot_of(self) -> Tensor:
        """int64 [layers, experts]: the placement, as far as exchanges were `done`."""
        return self._slot_of

    def observe(self, counts: Tensor, tokens: int, steps: int) -> None:
        """counts [layers, experts]: uses in the last `tokens` tokens, which took `steps` steps."""
        self._step += steps
        here, used = self._slot_of >= 0, counts.to(torch.float32)
        self._counts.mul_(0.5 ** (tokens / self.settings.half_life)).add_(used)
        hits, home_hits = float((used * here).sum()), float((used * self._home).sum())
        if self._judge.observe(hits - home_hits, tokens):
            self._allowance = 0.0
        self._allowance = min(
            self._allowance + self._per_decision * steps / self.settings.interval_steps,
            max(1.0, self._per_decision),
        )

    def wanted(self) -> list[Exchange]:
        """What should move now, most worthwhile first; each is under way until `done` or `dropped`."""
        room = int(self._allowance)
        if room == 0 or (self.resting and not self._going_home()):
            return []
        found = self._best(*self._scores(), room)
        self._allowance -= len(found)
        for exchange in found:
            self._mark(exchange, True)
        return found

    def done(self, exchange: Exchange) -> None:
        self._mark(exchange, False)
        self._slot_of[exchange.layer, exchange.leaving] = -1
        self._slot_of[exchange.layer, exchange.coming] = exchange.slot
        self._came[exchange.layer, exchange.coming] = self._step
        self._judge.exchanges += 1

    def dropped(self, exchange: Exchange) -> None:
        """It was not made: everything is where it was."""
        self._mark(exchange, False)

    def stranded(self, exchange: Exchange) -> None:
        """The leaving expert is in CPU memory, and so is the other; the slot is lost, the layer stays as it is."""
        self._slot_of[exchange.layer, exchange.leaving] = -1
        self._closed[exchange.layer] = True

    def _mark(self, exchange: Exchange, fixed: bool) -> None:
        layer, _, leaving, coming = exchange
        self._fixed[layer, leaving] = self._fixed[layer, coming] = fixed

    def _going_home(self) -> bool:
        away = int(((self._slot_of >= 0) & ~self._home).sum())
        return self._judge.loss * self.settings.shortest_rest > away * self._cost > 0

    def _scores(self) -> tuple[Tensor, Tensor]:
        """By how much one wants to be on the GPU, and by how much the newcomer's must exceed the other's."""
        if self.resting:
            return self._home.float(), torch.full((), 0.5)
        s = self.settings
        lasts = s.horizon_tokens / (s.half_life / torch.log(torch.tensor(2.0)))
        return self._counts, self._cost / lasts

    def _best(self, scores: Tensor, margin: Tensor, room: int) -> list[Exchange]:
        s, here = self.settings, self._slot_of >= 0
        young = (self._step - self._came < s.dwell_steps) & (not self.resting)
        infinite = torch.tensor(torch.inf)
        each = min(room, MOST_PER_LAYER, scores.shape[1])
        free = ~(self._fixed | self._closed)
        cold = scores.where(here & free & ~young, infinite).topk(each, 1, largest=False)
        hot = scores.where(~here & free, -infinite).topk(each, 1)
        gain = hot.values - cold.values
        least = torch.maximum(margin, cold.values * (s.factor - 1))
        pays = (gain >= least) & gain.isfinite() & ((hot.values >= s.touches) | self.resting)
        order = gain.where(pays, -infinite).flatten().topk(min(room, gain.numel())).indices
        rows = order[pays.flatten()[order]]
        layers, places = rows // each, rows % each
        leaving, coming = cold.indices[layers, places], hot.indices[layers, places]
        slots = self._slot_of[layers, leaving]
        columns = (layers, slots, leaving, coming)
        return [Exchange(*row) for row in torch.stack(columns, 1).tolist()]


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
