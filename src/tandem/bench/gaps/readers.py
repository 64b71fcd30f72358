"""Readers of answers while long prompts come and go: the times at which their pieces arrive."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import NamedTuple

import httpx

from tandem.bench.load_client import LoadClient, LoadError, SentRequest, ask, body_of, some_ids
from tandem.process.garbage import loaded_is_kept

POLL_SECONDS = 0.02
FIRST_PIECES = 8  # of an answer, which are not counted: its own prompt is among them
OWN_TOKENS = 64  # that a long prompt begins with, and no other: none finds another's pages


@dataclass(frozen=True, slots=True)
class GapLoad:
    """prompt_len: tokens of each long prompt; streams: answers that are read meanwhile, each after a prompt of
    input_len tokens and of output_len tokens, then another. Measured until `gaps` of them lay beside prompts, at least
    `prompts` of these came, or `seconds` have passed."""

    prompt_len: int
    streams: int = 1
    input_len: int = 256
    output_len: int = 1024
    gaps: int = 500
    prompts: int = 3
    seconds: float = 120.0
    seed: int = 0


class Gap(NamedTuple):
    """Between two pieces of one answer, in seconds since the start."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A long prompt: when it was sent, and when its only token came."""

    sent: float
    answered: float

    def meets(self, gap: Gap) -> bool:
        return gap.began < self.answered and gap.ended > self.sent


@dataclass(slots=True)
class GapFigures:
    """idle_prompts: those before anybody read and after; loaded_prompts: those that came while answers were read."""

    idle_prompts: list[LongPrompt] = field(default_factory=list)
    answers: list[SentRequest] = field(default_factory=list)
    loaded_prompts: list[LongPrompt] = field(default_factory=list)

    def gaps(self) -> Iterator[Gap]:
        for answer in self.answers:
            pieces = answer.pieces[FIRST_PIECES:]
            yield from map(Gap, pieces, pieces[1:])

    def pieces(self, began: float = 0.0, ended: float = inf) -> int:
        """How many came in a time: about as many as gaps. Soon said, for whoever asks reads answers meanwhile."""
        counts = (bisect(a.pieces, ended) - max(FIRST_PIECES, bisect(a.pieces, began)) for a in self.answers)
        return sum(max(0, count) for count in counts)

    def idle_gaps(self) -> list[Gap]:
        first = self.loaded_prompts[0].sent if self.loaded_prompts else inf
        return [gap for gap in self.gaps() if gap.ended < first]

    def loaded_gaps(self) -> list[Gap]:
        return [gap for gap in self.gaps() if any(prompt.meets(gap) for prompt in self.loaded_prompts)]


class LongPrompts:
    """Bodies of requests. What all have in common is written once: making 16,000 numbers takes 20 ms, in which pieces
    of the answers that are timed would lie unread."""

    def __init__(self, model: str, tokens: int, dice: random.Random) -> None:
        self._dice, self._own = dice, min(tokens, OWN_TOKENS)
        whole = body_of(model, [0, *some_ids(dice, tokens - self._own)], 1)
        self._before, self._behind = whole.split(b"[0", 1)

    def next(self) -> bytes:
        own = ",".join(map(str, some_ids(self._dice, self._own)))
        return self._before + b"[" + own.encode() + self._behind


def measure(client: LoadClient, model: str, load: GapLoad, report: Callable[[str], None]) -> GapFigures:
    """Raises LoadError when a request fails: its gaps would mean nothing."""
    with loaded_is_kept():
        return asyncio.run(_GapRun(client, model, load, report).run())


class _GapRun:
    """One measurement on its way."""

    def __init__(self, client: LoadClient, model: str, load: GapLoad, report: Callable[[str], None]) -> None:
        self._client, self._model, self._load, self._report = client, model, load, report
        self._dice = random.Random(load.seed)
        self._long, self._started = LongPrompts(model, load.prompt_len, self._dice), perf_counter()
        self._figures = GapFigures()
        self._http: httpx.AsyncClient

    async def run(self) -> GapFigures:
        async with self._client.http() as self._http:
            await self._long_prompt()  # first uses of memory and kernels
            await self._read_alone()
            async with self._read():
                self._report("answers alone")
                await self._until(lambda: self._figures.pieces() > self._load.gaps + len(self._figures.answers))
                self._report("answers beside long prompts")
                await self._read_together()
            await self._read_alone()  # others may use the machine, so before and after
        return self._figures

    async def _read_alone(self) -> None:
        self._report("long prompts alone")
        for _ in range(self._load.prompts):
            self._figures.idle_prompts.append(await self._long_prompt())

    async def _read_together(self) -> None:
        readings, gaps, last = self._figures, 0, perf_counter() + self._load.seconds
        while perf_counter() < last and (len(readings.loaded_prompts) < self._load.prompts or gaps < self._load.gaps):
            readings.loaded_prompts.append(prompt := await self._long_prompt())
            gaps += readings.pieces(prompt.sent, prompt.answered)

    async def _until(self, enough: Callable[[], bool]) -> None:
        last = perf_counter() + self._load.seconds
        while not enough() and perf_counter() < last:
            self._check()
            await asyncio.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[None]:
        readers = [asyncio.create_task(self._reader()) for _ in range(self._load.streams)]
        try:
            yield
            self._check()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _reader(self) -> None:
        while True:
            load = self._load
            body = body_of(self._model, some_ids(self._dice, load.input_len), load.output_len)
            await self._ask(body, load.input_len, self._figures.answers.append)

    async def _long_prompt(self) -> LongPrompt:
        answer = await self._ask(self._long.next(), self._load.prompt_len, lambda _answer: None)
        self._check(answer)
        return LongPrompt(answer.sent, answer.ended)

    async def _ask(self, body: bytes, prompt_len: int, begun: Callable[[SentRequest], None]) -> SentRequest:
        answer = SentRequest(perf_counter() - self._started, prompt_len)
        begun(answer)
        await ask(self._http, body, answer, self._started)
        return answer

    def _check(self, *more: SentRequest) -> None:
        for answer in (*self._figures.answers, *more):
            if answer.error is not None:
                raise LoadError(f"a request failed: {answer.error}")
