"""`LiveExperts`: placement follows the traffic. Once a step it looks at what was used, and has experts moved.

It waits for nothing. Counts are asked for after one step and looked at after the next. Bytes are copied beside the
steps.

Work has three places in a step:

- While it runs, between answers: what is done for each expert (`UseDecision`, `ExchangeTurn`). The engine's thread
  makes the copies to the GPU's slots and tables while it waits.
- After the CPU's last answer, while the GPU computes logits: what is left of that, for a while. Then this thread
  forgets experts that the step may still have used in CPU memory, asks, looks, decides, chooses what is copied next and
  notes what moved: small jobs in this order, each with cold caches.
- After a later step: jobs that the GPU would wait for. One is done in each step, however soon the GPU is.

While a prompt's task is under way beside steps, exchanges are held: no table, slot or place that it reads may change.
Counting and deciding go on.

Between two decisions, where nothing moves, a step costs one comparison of numbers.

What takes longer than the GPU does is measured. The exchanges' part is weighed against what they gain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar

from tandem import _core
from tandem.errors import EngineError
from tandem.experts.live.cost import READS_PER_EXCHANGE
from tandem.experts.live.exchange import ExchangeOutcome, LiveExchange
from tandem.experts.live.policy import LivePolicy
from tandem.experts.live.virtual import Exchange
from tandem.experts.usage.expert_usage import Change, Changes, Counted

_log = logging.getLogger(__name__)

REMEMBERED = 64  # exchanges whose time is averaged
GIVE_UP = 32  # exchanges in vain
OF_EXCHANGES = ("prepare", "begin", "end")  # the parts that take longer the more there are
AT_ONCE = ("ask", "end")  # never put off: what is counted until then counts for where experts were
PARTS = ("ask", "end", "note", "look", "give", "decide", "prepare", "begin")


class UseCounts(Protocol):
    """In how many steps each expert was read, as of when it was asked. A long prompt's step reads nearly all, once."""

    def reads(self) -> Counted:
        """Since the start, [layers, experts]; only differences mean something, modulo 2^32."""
        ...


AnyCounts = TypeVar("AnyCounts", bound=UseCounts)


class UsageCounter(Protocol[AnyCounts]):
    """Interface of `experts.usage.ExpertUsage`."""

    swap_rests: int
    copy: Callable[[int, int, int], None] | None

    def ask(self) -> AnyCounts:
        """Begins to copy the counts of the steps until now, without waiting for them."""
        ...

    def moved(self, changes: Changes, swaps: int, now: AnyCounts | None = None) -> None:
        """now: what `ask` has answered after this step, if it was asked."""
        ...

    def note(self) -> None:
        """A good time to look at what has moved."""
        ...


class LiveTimes(NamedTuple):
    """Since the start. bytes_moved: both ways together. seconds: of the engine's thread, without what it did between
    layers: that is overlapped_seconds. overrun_seconds: of these, what pieces took beyond their time. waited: what the
    GPU may have stood still for, `overrun_seconds` included. parts: seconds by what was done. hidden: of `seconds`,
    what the GPU did not stand still for. put_off: steps that left jobs to a later one."""

    steps: int
    exchanges: int
    bytes_moved: int
    seconds: float
    waited: float
    overlapped_seconds: float
    overrun_seconds: float
    parts: dict[str, float]
    hidden: float = 0.0
    put_off: int = 0


class _CountsAt(NamedTuple):
    counts: UseCounts
    steps: int  # that they are of
    asked: int  # steps since the start, when they were asked for


def _over() -> bool:
    return True


def _nobody_waits() -> bool:
    return False


NOTHING_MOVES = -2  # no number of moves
NEVER = 1 << 62  # a step that is not reached
SETTLED = 2  # steps after which the GPU has done what an exchange gave it last


class LiveExperts:
    """Call `beside_step` when a step was started, and `after_step` when the CPU has done its part of it. They raise
    nothing: if moving fails, experts stay where they are from now on."""

    def __init__(
        self,
        policy: LivePolicy,
        exchange: LiveExchange,
        usage: UsageCounter[Any],
        read_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """read_seconds: what the CPU takes to compute with one expert, measured so far; 0: not known."""
        self._policy, self._exchange, self._usage = policy, exchange, usage
        self._read_seconds, self._clock = read_seconds, clock
        self._spent, self._since_decision = 0.0, 0  # seconds that steps stood still, and exchanges that they were for
        self._all_steps, self._exchanges, self._waited = 0, 0, 0.0  # since the start
        self._put_off, self._parts = 0, dict.fromkeys(PARTS, 0.0)
        self._exchanged_late = 0.0  # seconds of exchanges' pieces that are in `_spent` already
        self._decisions: list[_core.Meanwhile] = []  # from `look` to `decide`
        policy.start(usage.ask().reads())
        self._counts_asked: _CountsAt | None = None  # until they were looked at
        self._counts_now: UseCounts | None = None  # that were asked for after this step
        self._deciding = False  # whether `_decisions` were given to a step
        self._made_last: list[Exchange] = []  # that the policy does not know of yet
        self._untold: ExchangeOutcome | None = None  # that those who count do not know of yet
        self._asked_at, self._idle_until = 0, 0  # steps: after the last `ask`, and until when there is nothing to do
        self._held, self._written = False, -SETTLED  # the step in which an exchange gave the GPU something last
        self._in_vain = 0  # exchanges dropped since the last one that was made
        self._failed = False

    @property
    def resting(self) -> bool:
        """Whether nothing moves because it did not pay, or because moving has failed."""
        return self._failed or self._policy.resting

    @property
    def cost(self) -> float:
        """Cost of an exchange as it is weighed now, in reads of an expert from CPU memory."""
        return self._policy.cost

    def times(self) -> LiveTimes:
        moved, seconds = self._exchange.bytes_moved, sum(self._parts.values())
        works = self._policy.beside
        overlapped = self._exchange.beside_seconds + sum(work.seconds for work in works)
        late_seconds = self._exchange.late_seconds + sum(work.late_seconds for work in works)
        return LiveTimes(
            self._all_steps,
            self._exchanges,
            moved,
            seconds,
            self._waited + late_seconds,
            overlapped,
            late_seconds,
            dict(self._parts),
            seconds - self._waited,
            self._put_off,
        )

    def moves(self) -> int | None:
        """As `LiveExchange.moves`; always the same once moving has failed, unless that was while something was under
        way: the rest of it may still be done."""
        return NOTHING_MOVES if self._failed and not self._exchange.under_way else self._exchange.moves()

    @property
    def settling(self) -> bool:
        """Whether the GPU may still have to change slots or tables, in the order of its steps."""
        return self._exchange.under_way or self._all_steps - self._written < SETTLED

    def pause(self) -> None:
        """Before a prompt's task: what it reads stays as it is until `resume`."""
        self._held = True

    def resume(self) -> None:
        self._held = False

    def beside_step(self) -> None:
        if self._all_steps < self._idle_until:
            return
        if self._exchange.under_way and not self._held:
            self._written = self._all_steps
            self._guarded("begin", self._exchange.begin, _over)
        if self._decisions and not self._deciding:
            self._guarded("give", self._give, _over)

    def after_step(self, over: Callable[[], bool] = _nobody_waits) -> None:
        """over: whether the GPU has ended the step meanwhile, and waits."""
        self._all_steps += 1
        if self._all_steps < self._idle_until:
            return
        self._counts_now, is_over = None, False
        for part, action in self._jobs():
            if is_over and part not in AT_ONCE:
                self._put_off += 1
                break
            is_over = self._guarded(part, action, over)
        self._idle_until = self._next_job()

    def _next_job(self) -> int:
        """The step after which there is something to do again; 0: it is under way."""
        if self._failed:
            return NEVER
        if self._exchange.busy or self._untold is not None or self._made_last:
            return 0
        if self._counts_asked is not None or self._decisions:
            return 0
        return self._asked_at + self._policy.interval_steps

    def _jobs(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Jobs to be done now, one after the other: whether one is due depends on those before. What follows from a job
        comes before another of its kind, so none is put off for ever."""
        if self._asks_after(self._policy.interval_steps):
            yield "ask", self._ask
        if self._exchange.under_way and not self._held:
            self._written = self._all_steps
            yield "end", partial(self._move, self._exchange.end)
        if self._untold is not None:
            yield "ask", self._tell
        if self._prepares:
            yield "prepare", partial(self._move, self._exchange.prepare)
        if self._made_last:
            yield "note", self._note
        while self._deciding and not self._failed:
            yield "decide", self._decide
            if self._prepares:
                yield "prepare", partial(self._move, self._exchange.prepare)
        if self._counts_asked is not None and self._counts_asked.asked < self._all_steps:
            yield "look", partial(self._look, self._counts_asked)

    @property
    def _prepares(self) -> bool:
        return self._exchange.waiting and not self._held

    def _asks_after(self, steps: int) -> bool:
        """True if usage counts are due: `steps` steps since the last ones, which are decided about."""
        return self._all_steps - self._asked_at >= steps and self._counts_asked is None and not self._decisions

    def finish(self) -> None:
        """Makes all exchanges that were decided on, waiting for their copies."""
        while self._exchange.busy and not self._failed:
            self._guarded("end", partial(self._move, self._exchange.end), _nobody_waits)
            self._guarded("ask", self._tell, _nobody_waits)
            self._guarded("prepare", partial(self._move, self._exchange.prepare), _nobody_waits)
        self._guarded("note", self._note, _nobody_waits)

    def _guarded(self, part: str, action: Callable[[], None], over: Callable[[], bool]) -> bool:
        """Runs one job, and times it. True if the GPU had ended its step by then, and waits."""
        if self._failed:
            return False
        started = self._clock()
        try:
            action()
        except Exception:
            self._failed = True
            _log.exception("live placement has failed; experts stay where they are")
            exchanges, self._made_last = self._made_last, []
            self._policy.done(*exchanges)  # it knows where experts are, and others ask it
        seconds = self._clock() - started
        self._parts[part] += seconds
        is_over = over()
        if is_over:
            self._waited += seconds
            self._spent += seconds if part in OF_EXCHANGES else 0.0
        return is_over

    def _ask(self) -> None:
        self._counts_now = self._usage.ask()
        self._counts_asked = _CountsAt(self._counts_now, self._all_steps - self._asked_at, self._all_steps)
        self._asked_at = self._all_steps

    def _look(self, snapshot: _CountsAt) -> None:
        self._counts_asked = None
        self._weigh()
        self._decisions = self._policy.look(snapshot.counts.reads(), snapshot.steps)

    def _give(self) -> None:
        """To the step that was started: passes over all experts are done between its answers."""
        self._deciding = True
        for decision in self._decisions:
            self._exchange.between_answers(decision)

    def _decide(self) -> None:
        if self._policy.decide():
            return
        self._deciding, self._decisions = False, []
        self._usage.swap_rests = self._policy.rests
        self._exchange.add(self._policy.next_exchanges())

    def _weigh(self) -> None:
        """Gives the policy the recent cost of exchanges, in its unit: steps stood still for it."""
        late_seconds = self._exchange.late_seconds
        self._spent += late_seconds - self._exchanged_late
        self._exchanged_late = late_seconds
        read = self._read_seconds()
        if self._since_decision == 0 or read <= 0:
            return
        self._policy.cost = READS_PER_EXCHANGE + self._spent / self._since_decision / read
        if self._since_decision > REMEMBERED:
            self._spent, self._since_decision = self._spent * REMEMBERED / self._since_decision, REMEMBERED

    def _move(self, what: Callable[[], ExchangeOutcome]) -> None:
        outcome = what()
        self._follow(outcome)
        self._since_decision += len(outcome.done)
        self._exchanges += len(outcome.done)

    def _follow(self, outcome: ExchangeOutcome) -> None:
        self._made_last += outcome.done
        for exchange in outcome.dropped:
            self._policy.dropped(exchange)
        for exchange in outcome.stranded:
            self._policy.stranded(exchange)
        for layer in outcome.ended:
            self._policy.ended(layer)
        self._untold = outcome if outcome.done or outcome.stranded else None
        self._in_vain = 0 if outcome.done else self._in_vain + len(outcome.dropped)
        if self._in_vain >= GIVE_UP:
            self._tell()
            raise EngineError(f"{self._in_vain} exchanges of experts failed one after the other")

    def _tell(self) -> None:
        """Has what was counted until now count for where experts were. Counts that a decision wants soon are the same
        ones."""
        outcome, self._untold = self._untold, None
        if outcome is None:
            return
        if self._counts_now is None and self._asks_after(self._policy.interval_steps - 1):
            self._ask()
        self._usage.moved(partial(_changes, outcome), len(outcome.done), self._counts_now)

    def _note(self) -> None:
        """Does the bookkeeping that can wait for a step: nothing is decided or begun before it."""
        exchanges, self._made_last = self._made_last, []
        if exchanges:
            self._policy.done(*exchanges)
        self._usage.note()


def _changes(outcome: ExchangeOutcome) -> list[Change]:
    departures = [(layer, leaving, False) for layer, _, leaving, _ in (*outcome.done, *outcome.stranded)]
    return departures + [(layer, coming, True) for layer, _, _, coming in outcome.done]
