"""What a reader of an answer sees while long prompts come and go: the times at which its pieces arrive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import httpx

from tandem.bench.load_client import Answer, LoadClient, LoadError, ask, body_of, some_ids

POLL_SECONDS = 0.02
FIRST_PIECES = 8  # of an answer, which are not counted: its own prompt is among them


@dataclass(frozen=True, slots=True)
class Wanted:
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
class Prompt:
    """A long prompt: when it was sent, and when its only token came."""

    sent: float
    came: float

    def meets(self, gap: Gap) -> bool:
        return gap.began < self.came and gap.ended > self.sent


@dataclass(slots=True)
class Seen:
    """alone: prompts before anybody read and after; beside: those that came while answers were read."""

    alone: list[Prompt] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    beside: list[Prompt] = field(default_factory=list)

    def gaps(self) -> Iterator[Gap]:
        for answer in self.answers:
            pieces = answer.pieces[FIRST_PIECES:]
            yield from map(Gap, pieces, pieces[1:])

    def idle_gaps(self) -> list[Gap]:
        first = self.beside[0].sent if self.beside else float("inf")
        return [gap for gap in self.gaps() if gap.ended < first]

    def gaps_beside(self) -> list[Gap]:
        return [gap for gap in self.gaps() if any(prompt.meets(gap) for prompt in self.beside)]


def seen(client: LoadClient, model: str, wanted: Wanted, said: Callable[[str], None]) -> Seen:
    """Raises LoadError when a request fails: its gaps would mean nothing."""
    return asyncio.run(_Reading(client, model, wanted, said).run())


class _Reading:
    """One measurement on its way."""

    def __init__(self, client: LoadClient, model: str, wanted: Wanted, said: Callable[[str], None]) -> None:
        self._client, self._model, self._wanted, self._said = client, model, wanted, said
        self._dice, self._started = random.Random(wanted.seed), perf_counter()
        self._seen = Seen()
        self._http: httpx.AsyncClient

    async def run(self) -> Seen:
        async with self._client.http() as self._http:
            await self._long_prompt()  # first uses of memory and kernels
            await self._alone()
            async with self._read():
                self._said("answers alone")
                await self._until(lambda: len(self._seen.idle_gaps()) >= self._wanted.gaps)
                self._said("answers beside long prompts")
                await self._beside()
            await self._alone()  # others may use the machine, so before and after
        return self._seen

    async def _alone(self) -> None:
        self._said("long prompts alone")
        for _ in range(self._wanted.prompts):
            self._seen.alone.append(await self._long_prompt())

    async def _beside(self) -> None:
        found, last = self._seen, perf_counter() + self._wanted.seconds
        while perf_counter() < last and (
            len(found.beside) < self._wanted.prompts or len(found.gaps_beside()) < self._wanted.gaps
        ):
            found.beside.append(await self._long_prompt())

    async def _until(self, enough: Callable[[], bool]) -> None:
        last = perf_counter() + self._wanted.seconds
        while not enough() and perf_counter() < last:
            self._check()
            await asyncio.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[None]:
        readers = [asyncio.create_task(self._reader()) for _ in range(self._wanted.streams)]
        try:
            yield
            self._check()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _reader(self) -> None:
        while True:
            await self._ask(self._wanted.input_len, self._wanted.output_len, self._seen.answers.append)

    async def _long_prompt(self) -> Prompt:
        answer = await self._ask(self._wanted.prompt_len, 1, lambda _answer: None)
        self._check(answer)
        return Prompt(answer.sent, answer.ended)

    async def _ask(self, prompt_len: int, output_len: int, begun: Callable[[Answer], None]) -> Answer:
        prompt = some_ids(self._dice, prompt_len)
        answer = Answer(perf_counter() - self._started, prompt_len)
        begun(answer)
        await ask(self._http, body_of(self._model, prompt, output_len), answer, self._started)
        return answer

    def _check(self, *more: Answer) -> None:
        for answer in (*self._seen.answers, *more):
            if answer.error is not None:
                raise LoadError(f"a request failed: {answer.error}")
