"""`LiveExperts`: placement follows the traffic. Between steps it looks at what was used, and has experts moved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from torch import Tensor

from tandem.errors import EngineError
from tandem.experts.live_exchange import LiveExchange, Settled
from tandem.experts.live_policy import LivePolicy

_log = logging.getLogger(__name__)

HITS_PER_EXCHANGE = 6.0
"""Reads of an expert from CPU memory that take as long as the bytes of an exchange: 2 x DRAM ÷ PCIe bandwidth, 4.7 to
6.2 on the machine that this was measured on (130 to 172 and 55 GB/s). The time between steps, measured, is added."""
REMEMBERED = 64  # exchanges whose time is averaged


GIVE_UP = 32  # exchanges in vain


class Totals(Protocol):
    @property
    def tokens(self) -> Tensor: ...


class Usage(Protocol):
    """What `experts.usage.ExpertUsage` offers: counts since the start, int64 [layers, experts]; where experts are."""

    swap_rests: int

    def read(self) -> Totals: ...

    def place(self, on_gpu: Tensor, swaps: int) -> None: ...


class LiveExperts:
    """Call `after_step` after each of the model's steps, when nothing of it is running any more."""

    def __init__(
        self,
        policy: LivePolicy,
        exchange: LiveExchange,
        usage: Usage,
        read_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """read_seconds: what the CPU takes to compute with one expert, measured so far; 0: not known."""
        self._policy, self._exchange, self._usage = policy, exchange, usage
        self._read_seconds, self._clock = read_seconds, clock
        self._spent, self._made = 0.0, 0  # seconds between steps, and exchanges that they were for
        self._seen = usage.read().tokens
        self._tokens = self._steps = 0
        self._in_vain = 0  # exchanges dropped since the last one that was made
        self._failed = False

    @property
    def resting(self) -> bool:
        """Whether nothing moves because it did not pay, or because moving has failed."""
        return self._failed or self._policy.resting

    def after_step(self, tokens: int) -> None:
        """tokens: that the step computed. Raises nothing: if moving fails, experts stay where they are from now on."""
        if self._failed:
            return
        try:
            self._advance(tokens)
        except Exception:
            self._failed = True
            _log.exception("live placement has failed; experts stay where they are")

    def _advance(self, tokens: int) -> None:
        self._tokens += tokens
        self._steps += 1
        deciding = self._steps >= self._policy.settings.interval_steps
        if self._exchange.busy:
            started = self._clock()
            settled = self._exchange.advance(ending=deciding)
            self._settle(settled)
            self._spent += self._clock() - started
            self._made += len(settled.done)
        if deciding:
            self._weigh()
            self._decide()

    def _weigh(self) -> None:
        """What exchanges have cost lately, as the policy counts: steps stood still for it."""
        read = self._read_seconds()
        if self._made == 0 or read <= 0:
            return
        self._policy.cost = HITS_PER_EXCHANGE + self._spent / self._made / read
        if self._made > REMEMBERED:
            self._spent, self._made = self._spent * REMEMBERED / self._made, REMEMBERED

    def _settle(self, settled: Settled) -> None:
        self._in_vain = 0 if settled.done else self._in_vain + len(settled.dropped)
        if self._in_vain >= GIVE_UP:
            raise EngineError(f"{self._in_vain} exchanges of experts failed one after the other")
        if settled.done or settled.stranded:
            self._usage.read()  # until now they were used where they had been
        for exchange in settled.done:
            self._policy.done(exchange)
        for exchange in settled.dropped:
            self._policy.dropped(exchange)
        for exchange in settled.stranded:
            self._policy.stranded(exchange)
        if settled.done or settled.stranded:
            self._usage.place(self._policy.slot_of >= 0, len(settled.done))

    def _decide(self) -> None:
        used = self._usage.read().tokens
        self._policy.observe(used - self._seen, self._tokens, self._steps)
        self._seen, self._tokens, self._steps = used, 0, 0
        self._usage.swap_rests = self._policy.rests
        self._exchange.add(self._policy.wanted())
