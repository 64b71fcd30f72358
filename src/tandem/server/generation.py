"""One HTTP request's answers as they come: collected for a plain response, or sent as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tandem.engine.protocol import GenerateRequest, TokenLogprob, TokenOutput
from tandem.errors import TandemError
from tandem.server.body import json_response
from tandem.server.errors import ApiError, as_api_error, body_of
from tandem.server.guard.connection import Deadline
from tandem.server.limits import WAITING_SECONDS
from tandem.server.openai_schema import PromptTokensDetails, Usage
from tandem.server.state import ServerState

log = logging.getLogger("tandem.server")

DONE = b"data: [DONE]\n\n"
EVENTS = "text/event-stream"

Failed = Callable[[ApiError], bytes]


class AnswerWriter(Protocol):
    """Writes a request's answers in a dialect: `take` and `whole`, or `frames` and `last`."""

    def take(self, outputs: list[TokenOutput]) -> object: ...
    def whole(self) -> Any:
        """All that was taken, as JSON."""
        ...

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        """The events of one wake-up: one write. They may be none."""
        ...

    def last(self) -> bytes:
        """Last bytes of a stream."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Last bytes of a stream that has begun and fails, instead of `last`."""
        ...

    def waiting(self) -> bytes:
        """Bytes of a stream before there is anything to say. They may be none."""
        ...


@dataclass(slots=True)
class PartialAnswer:
    """One of the n answers of one prompt, so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_match: str | int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, output: TokenOutput) -> None:
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.finish_reason = output.finish_reason
        self.stop_match = output.stop_match
        self.prompt_tokens = max(self.prompt_tokens, output.prompt_tokens)
        self.completion_tokens = max(self.completion_tokens, output.completion_tokens)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)

    def forget(self) -> None:
        """Drops texts, ids and probabilities that were sent; the numbers stay."""
        for entries in (self.texts, self.token_ids, self.logprobs, self.prompt_logprobs):
            entries.clear()


class TokenCount:
    """Usage of a stream, counted along: each prompt once, every answer."""

    def __init__(self) -> None:
        self._prompt: dict[str, tuple[int, int]] = {}
        self._completion: dict[tuple[str, int], int] = {}

    def add(self, output: TokenOutput) -> None:
        tokens, cached = self._prompt.get(output.id, (0, 0))
        self._prompt[output.id] = (max(tokens, output.prompt_tokens), max(cached, output.cached_tokens))
        key = (output.id, output.index)
        self._completion[key] = max(self._completion.get(key, 0), output.completion_tokens)

    def usage(self) -> Usage:
        prompt = sum(tokens for tokens, _ in self._prompt.values())
        cached = sum(cached for _, cached in self._prompt.values())
        completion = sum(self._completion.values())
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def usage_of(answers: Sequence[Sequence[PartialAnswer]]) -> Usage:
    """`answers[prompt][index]`."""
    prompt = sum(max(a.prompt_tokens for a in each) for each in answers)
    cached = sum(max(a.cached_tokens for a in each) for each in answers)
    completion = sum(a.completion_tokens for each in answers for a in each)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class SubmittedRequests:
    """Submitted requests. When the client leaves, `Gate` cancels whoever waits for them.

    Whoever makes one calls `close`, which aborts what still runs.
    """

    def __init__(
        self, state: ServerState, http: Request, requests: Sequence[GenerateRequest], name: str = "",
        probe: bool = False,
    ) -> None:  # fmt: skip
        """name: by which `/abort_request` stops all of them. probe: no use of the engine, only a question to it."""
        self.requests = requests
        self._client = state.client
        self._pixels = state.pixels_of(requests)  # the engine maps them while the request runs
        self._stream = state.submit(requests, name, probe)
        self._span = state.traces.begin(http.url.path, http.headers, requests)
        self._alarm = self._set_alarm(http)

    def position(self, output: TokenOutput) -> int:
        """Which of `requests` an output belongs to."""
        return self._stream.position[output.id]

    async def next(self) -> list[TokenOutput]:
        try:
            outputs = await self._stream.next()
        except Exception as error:
            self._span.failed(error)
            raise
        self._span.add(outputs)
        return outputs

    async def next_within(self, seconds: float) -> list[TokenOutput] | None:
        """None: nothing came."""
        try:
            async with asyncio.timeout(seconds):
                return await self.next()
        except TimeoutError:
            return None

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._client.release(self._stream)
        self._pixels = []
        self._span.end()

    async def collect(self) -> list[list[PartialAnswer]]:
        """All answers, complete: `[prompt][index]`. Closes."""
        answers = [[PartialAnswer() for _ in range(r.sampling.n)] for r in self.requests]

        def add(outputs: list[TokenOutput]) -> None:
            for output in outputs:
                answers[self.position(output)][output.index].add(output)

        await self.run(add)
        return answers

    async def run(self, take: Callable[[list[TokenOutput]], object]) -> None:
        """`take` gets all outputs as they come. Closes."""
        try:
            while outputs := await self.next():
                take(outputs)
        finally:
            self.close()

    async def answer(self, writer: AnswerWriter, stream: bool | None, media_type: str = EVENTS) -> Response:
        """Closes, at once or with the stream. media_type: of a stream. A mistake of the writer is an ApiError, too."""
        if stream:
            return await self.events(
                Writing(writer.frames, writer.last, writer.failed, writer.waiting), media_type
            )
        try:
            await self.run(writer.take)
            return json_response(writer.whole())
        except TandemError:
            raise
        except Exception as error:
            raise as_api_error(error) from error

    async def events(self, writing: Writing, media_type: str = EVENTS) -> EventStream:
        """Waits a while for the first output, so that most refusals still get their own HTTP status."""
        try:
            first = await self.next_within(WAITING_SECONDS)
        except BaseException:
            self.close()
            raise
        return EventStream(self, first, writing, media_type)

    def _set_alarm(self, http: Request) -> asyncio.TimerHandle | None:
        """`Gate` ends a request that is late; a stream that has begun must end with an event."""
        deadline: Deadline | None = getattr(http.state, "deadline", None)
        if deadline is None:
            return None
        return asyncio.get_running_loop().call_at(deadline.at, self._stream.fail_reader, deadline.error())


class Writing(NamedTuple):
    """`frames(outputs)` gives the bytes of all events of one wake-up (one write); `last()` those of the end, `failed`
    those of another end, `waiting` those that are sent while there are none."""

    frames: Callable[[list[TokenOutput]], bytes]
    last: Callable[[], bytes]
    failed: Failed
    waiting: Callable[[], bytes]


class EventStream(StreamingResponse):
    """Not Starlette's own loop: that costs a task and a queue hop per chunk, and two processes share few cores.
    """

    def __init__(
        self, generation: SubmittedRequests, first: list[TokenOutput] | None, writing: Writing, media_type: str
    ) -> None:
        """first: None: it has not come yet."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would collect events
        super().__init__(iter(()), media_type=media_type, headers=headers)
        self._generation = generation
        self._first = first
        self._writing = writing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            await self._send_all(send)
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        data, more = await self._first_part(send)
        while more:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            data, more = await self._next_part()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _first_part(self, send: Send) -> tuple[bytes, bool]:
        """A long prompt takes minutes. Clients and proxies that hear nothing would give up."""
        outputs = self._first
        while outputs is None:
            if data := self._writing.waiting():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            try:
                outputs = await self._generation.next_within(WAITING_SECONDS)
            except Exception as error:
                return self._ended_by(error), False
        return self._part(outputs)

    async def _next_part(self) -> tuple[bytes, bool]:
        try:
            outputs = await self._generation.next()
        except Exception as error:
            return self._ended_by(error), False
        return self._part(outputs)

    def _part(self, outputs: list[TokenOutput]) -> tuple[bytes, bool]:
        """Bytes to send, and whether more comes. A mistake of the writer ends this stream, as an error of the
        engine."""
        try:
            return (self._writing.frames(outputs), True) if outputs else (self._writing.last(), False)
        except Exception as error:
            return self._ended_by(error), False

    def _ended_by(self, error: Exception) -> bytes:
        try:
            return self._writing.failed(as_api_error(error))
        except Exception:  # what it has of the answer may be what is wrong
            log.exception("a bug in the server, at the end of a stream")
            return b""


def frame(data: bytes, event: str = "") -> bytes:
    """One server-sent event."""
    named = f"event: {event}\n".encode() if event else b""
    return named + b"data: " + data + b"\n\n"


def comment() -> bytes:
    """A server-sent event that clients skip."""
    return b": waiting\n\n"


def openai_failure(error: ApiError) -> bytes:
    return frame(body_of(error)) + DONE
