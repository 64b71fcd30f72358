"""Load on a server with OpenAI's completions API: many requests at once, and when their tokens came."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from tandem.errors import TandemError

# A queued request may wait for all those before it.
_TIMEOUT = httpx.Timeout(30.0, read=3600.0)
_JSON = {"Content-Type": "application/json"}
FIRST_ID, LAST_ID = 200, 10_000  # of prompt tokens: words in every vocabulary, no control tokens


class LoadError(TandemError):
    """The server could not be measured; the text says what to do."""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The load to send. Lengths are tokens; spread 0.5: between half and one and a half times as many. concurrency:
    requests in flight, a new one when one ends; or rate: requests per second, at random times (Poisson). texts: what is
    asked, with its answer's length, again from the start where they are too few; empty: token ids at random."""

    requests: int
    input_len: int
    output_len: int
    concurrency: int | None = None
    rate: float | None = None
    spread: float = 0.0
    shared_prefix: int = 0  # first tokens that all prompts have in common
    seed: int = 0
    texts: tuple[tuple[str, int], ...] = ()


Prompt = list[int] | str


@dataclass(slots=True)
class SentRequest:
    """One request: seconds after the start of the run at which it was sent and its pieces came."""

    sent: float
    prompt_tokens: int
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    error: str | None = None

    @property
    def first_token_seconds(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds per token of decoding, None for one token: the first token's time is the prompt's."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of the answer, as a reader sees them."""
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


def some_ids(dice: random.Random, count: int) -> list[int]:
    """`count` random ids of ordinary tokens."""
    return [dice.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def prompts_of(load: LoadShape) -> list[tuple[Prompt, int]]:
    """(prompt, answer length) of every request; the same for a seed."""
    dice = random.Random(load.seed)
    if load.texts:
        texts = dice.sample(load.texts, len(load.texts))
        return [texts[number % len(texts)] for number in range(load.requests)]
    prefix = some_ids(dice, load.shared_prefix)

    def length(mean: int) -> int:
        return max(1, round(mean * dice.uniform(1 - load.spread, 1 + load.spread)))

    return [
        (
            prefix + some_ids(dice, length(load.input_len)),
            length(load.output_len),
        )
        for _ in range(load.requests)
    ]


@dataclass(frozen=True, slots=True)
class ServedExperts:
    """Placement of a server's routed experts, as its own plan says. None: not known, as of another server.

    gpu_share: those on GPUs, 0 to 1; placement: the strategy that chose them; live: they change places meanwhile."""

    gpu_share: float | None = None
    placement: str | None = None
    live: bool | None = None

    @classmethod
    def of(cls, plan: Mapping[str, Any] | None) -> ServedExperts:
        """plan: of `/server_info`."""
        if plan is None:
            return cls()
        if plan["gpu"] is None:
            return cls(0.0, None, False)
        count = next((each["value"] for each in plan["decisions"] if each["name"] == "GPU experts"), "")
        there, _, everyone = count.partition(" of ")
        share = int(there) / max(1, int(everyone)) if everyone else None
        return cls(share if share is None else round(share, 4), plan["gpu"]["placement"], plan["gpu"]["live"])

    def text(self) -> str:
        """As a table says it; "": there is nothing to say."""
        if not self.gpu_share:
            return ""
        moving = ", which change places" if self.live else ""
        return f"{self.gpu_share:.0%} of the experts on the GPU ({self.placement}){moving}"


class LoadClient:
    """`run` sends a load and collects the answers; a failed request is an answer with an error."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def model_name(self) -> str:
        """Raises LoadError when there is no such server."""
        try:
            answer = httpx.get(f"{self._url}/v1/models", headers=self._headers, timeout=10.0, trust_env=False)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except httpx.HTTPStatusError as error:
            hint = "give --api-key" if error.response.status_code in (401, 403) else "is it an OpenAI server?"
            raise LoadError(f"{self._url}/v1/models answers {error.response.status_code}; {hint}") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise LoadError(
                f"no OpenAI server answers at {self._url} ({error}); start one with kt serve, or give another --url"
            ) from error

    def served_experts(self, model: str) -> ServedExperts:
        """As the server says it; a server that is no Tandem does not."""
        try:
            url, query = f"{self._url}/server_info", {"model": model}
            answer = httpx.get(url, params=query, headers=self._headers, timeout=10.0, trust_env=False)
            answer.raise_for_status()
            return ServedExperts.of(answer.json().get("plan"))
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
            return ServedExperts()

    def http(self) -> httpx.AsyncClient:
        """For any number of requests at once."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=_TIMEOUT, limits=limits, trust_env=False
        )

    def run(self, model: str, load: LoadShape, done: Callable[[int], None]) -> tuple[list[SentRequest], float]:
        """All answers and the seconds from the first request to the last token. `done(n)` after each answer."""
        return asyncio.run(self._run(model, load, done))

    async def _run(self, model: str, load: LoadShape, done: Callable[[int], None]) -> tuple[list[SentRequest], float]:
        async with self.http() as http:
            answers: list[SentRequest] = []
            gate = asyncio.Semaphore(load.concurrency or load.requests)
            started = perf_counter()

            async def one(prompt: Prompt, length: int) -> None:
                async with gate:
                    answer = SentRequest(perf_counter() - started, 0 if isinstance(prompt, str) else len(prompt))
                    await ask(http, body_of(model, prompt, length), answer, started)
                    answers.append(answer)
                done(len(answers))

            async with asyncio.TaskGroup() as group:
                async for prompt, length in _timed(load):
                    group.create_task(one(prompt, length))
        return answers, max((a.ended for a in answers), default=0.0)


async def _timed(load: LoadShape) -> AsyncIterator[tuple[Prompt, int]]:
    dice = random.Random(load.seed + 1)
    for request in prompts_of(load):
        yield request
        if load.rate is not None:
            await asyncio.sleep(dice.expovariate(load.rate))


def body_of(model: str, prompt: Prompt, length: int) -> bytes:
    """A streamed completion of exactly `length` tokens, as JSON."""
    body: dict[str, Any] = {
        "model": model, "prompt": prompt, "max_tokens": length, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(body, separators=(",", ":")).encode()


async def ask(http: httpx.AsyncClient, body: bytes, answer: SentRequest, started: float) -> None:
    """Fills `answer` as its pieces come, with times after `started`; an error is in it."""
    try:
        async with http.stream("POST", "/v1/completions", content=body, headers=_JSON) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"{response.status_code}: {text[:300]}"
            else:
                await _read(response, answer, started)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = perf_counter() - started
    if answer.error is None and not answer.tokens:
        answer.error = "the server sent no usage, so its tokens cannot be counted"


async def _read(response: httpx.Response, answer: SentRequest, started: float) -> None:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])[:300]
            return
        if any(choice.get("text") is not None for choice in event.get("choices", ())):
            answer.pieces.append(perf_counter() - started)
        usage = event.get("usage") or {}
        answer.tokens = usage.get("completion_tokens", answer.tokens)
        answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
