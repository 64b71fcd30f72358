"""The API process's side of the engine: requests go in, token streams come out, whatever happens to the engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from tandem.engine.protocol import (
    AbortRequest,
    EngineStats,
    ExpertsRecorded,
    ExpertTraffic,
    FirstToken,
    GenerateRequest,
    LookAtExperts,
    RecordExperts,
    TokenOutput,
)
from tandem.errors import BusyError, EngineError, RequestError, TandemError
from tandem.server.errors import ApiError
from tandem.server.limits import MAX_UNREAD_OUTPUTS, MAX_UNREAD_PER_ANSWER
from tandem.server.messages import CacheFlushed, FlushCache, FromEngine, RequestRefused, StepOutputs, ToEngine


class StreamObserver(Protocol):
    """Told what users notice; `server/metrics.py` counts it."""

    def first_token(self, seconds: float, took: FirstToken | None) -> None: ...
    def next_token(self, seconds: float, tokens: int) -> None: ...
    def finished(self, reason: str, seconds: float) -> None: ...


class _Answer:
    """Times of one of the n answers of one prompt."""

    __slots__ = ("last_token_at",)

    def __init__(self) -> None:
        self.last_token_at: float | None = None


class RequestStream:
    """The outputs of one HTTP request: one or more prompts, each with n answers, in the order they arrive.

    `next` returns what has come since the last call (at least one output), or [] when all answers are finished.
    """

    def __init__(self, requests: Sequence[GenerateRequest], observer: StreamObserver, name: str = "") -> None:
        """name: what the client calls all of `requests` together, if it does."""
        self.name = name
        self.position = {request.id: index for index, request in enumerate(requests)}
        self.submitted_at = time.monotonic()
        self._open = {(r.id, i): _Answer() for r in requests for i in range(r.sampling.n)}
        self.overflown = False  # so much lies unread that the answers must end
        self._most_unread = max(MAX_UNREAD_OUTPUTS, MAX_UNREAD_PER_ANSWER * len(self._open))
        self._observer = observer
        self._arrived: list[TokenOutput] = []
        self._error: TandemError | None = None
        self._wake: asyncio.Future[None] | None = None

    @property
    def open_answers(self) -> int:
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        return any(key[0] == request_id for key in self._open)

    def open_indices(self, request_id: str) -> list[int]:
        return [index for owner, index in self._open if owner == request_id]

    async def next(self) -> list[TokenOutput]:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        arrived, self._arrived = self._arrived, []
        return arrived

    def push(self, output: TokenOutput) -> None:
        answer = self._open.get((output.id, output.index))
        if answer is None:
            return
        self._observe(answer, output)
        if output.finish_reason is not None:
            del self._open[(output.id, output.index)]
        if output.finish_reason == "error":
            self._observer.finished("error", time.monotonic() - self.submitted_at)
            self.fail_reader(_failure(output))
            return
        self._arrived.append(output)
        self._notify()
        if len(self._arrived) > self._most_unread and self._error is None:
            message = f"{len(self._arrived)} tokens were made before any of them was read; read faster"
            self.fail_reader(ApiError(408, message, kind="timeout_error", code="client_too_slow"))
            self.overflown = True

    def end(self) -> None:
        """Nobody will read: nothing is open any more."""
        self._open.clear()

    def fail(self, error: TandemError, request_id: str | None = None) -> None:
        """The reader gets `error` after what has arrived. Answers of `request_id` (None: all) run no more."""
        for key in [k for k in self._open if request_id in (None, k[0])]:
            del self._open[key]
        if self._error is None:
            self._observer.finished("error", time.monotonic() - self.submitted_at)
        self.fail_reader(error)

    def fail_reader(self, error: TandemError) -> None:
        """The reader gets `error`; the answers run on until `EngineClient.release`."""
        if self._error is None:
            self._error = error
            self._notify()

    def _observe(self, answer: _Answer, output: TokenOutput) -> None:
        now = time.monotonic()
        if output.token_ids:
            if answer.last_token_at is None:
                self._observer.first_token(now - self.submitted_at, output.first_token)
            else:
                self._observer.next_token(now - answer.last_token_at, len(output.token_ids))
            answer.last_token_at = now
        if output.finish_reason is not None and output.finish_reason != "error":
            self._observer.finished(output.finish_reason, now - self.submitted_at)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def _failure(output: TokenOutput) -> TandemError:
    """Whose fault it was."""
    said = output.error or "the engine failed on this request"
    return EngineError(said) if output.refused is None else RequestError(said, output.refused)


class _Route(NamedTuple):
    """Where an output of the engine goes."""

    stream: RequestStream
    request_id: str  # the client's


class EngineClient:
    """Routes outputs to streams by request id. `attach` and `detach` follow the engine's lives.

    The engine knows a request by a serial number of ours. A client may use its id again at once, and what the engine
    still says about the earlier request must not reach the new one.

    Not thread-safe: everything happens on the event loop.
    """

    def __init__(self, observer: StreamObserver) -> None:
        self.stats = EngineStats()
        self._observer = observer
        self._send: Callable[[ToEngine], None] | None = None
        self._why_down = "the engine is starting"
        self._numbers = itertools.count()
        self._serials: dict[str, str] = {}  # of the client's request ids
        self._routes: dict[str, _Route] = {}  # by serial
        self._flushes: list[asyncio.Future[None]] = []
        self._recordings: list[asyncio.Future[ExpertsRecorded]] = []
        self._looks: list[asyncio.Future[ExpertTraffic]] = []

    @property
    def ready(self) -> bool:
        return self._send is not None

    @property
    def why_down(self) -> str:
        return self._why_down

    @property
    def open_answers(self) -> int:
        """Answers that are running or waiting, over all requests."""
        return sum(stream.open_answers for stream in self._all_streams())

    def _all_streams(self) -> set[RequestStream]:
        return {route.stream for route in self._routes.values()}

    def attach(self, send: Callable[[ToEngine], None]) -> None:
        """The engine is ready; from now on messages go through `send`."""
        self._send = send

    def detach(self, why: str) -> None:
        """The engine is gone: every request in flight ends now with an `EngineError`."""
        self._send = None
        self._why_down = why
        self.stats = EngineStats()
        streams = self._all_streams()
        self._routes, self._serials = {}, {}
        waiting: list[asyncio.Future[Any]] = [*self._flushes, *self._recordings, *self._looks]
        self._flushes, self._recordings, self._looks = [], [], []
        for stream in streams:
            stream.fail(EngineError(why))
        for answer in waiting:
            if not answer.done():
                answer.set_exception(EngineError(why))

    def submit(self, requests: Sequence[GenerateRequest], name: str = "") -> RequestStream:
        """`abort` then takes `name` for all of them. Raises EngineError when no engine is ready, RequestError when an
        id is already in use."""
        for request in requests:
            if request.id in self._serials:
                raise RequestError(f"the request id {request.id!r} is in use; send another", "rid")
        stream = RequestStream(requests, self._observer, name)
        for request in requests:
            serial = str(next(self._numbers))
            self._tell(msgspec.structs.replace(request, id=serial))
            self._serials[request.id] = serial
            self._routes[serial] = _Route(stream, request.id)
        return stream

    def release(self, stream: RequestStream) -> None:
        """The reader is done with `stream`; answers that still run are aborted and their pages come back."""
        for request_id in stream.position:
            serial = self._serials.get(request_id, "")
            if serial not in self._routes or self._routes[serial].stream is not stream:
                continue
            del self._serials[request_id], self._routes[serial]
            if self._send is not None and stream.is_open(request_id):
                self._send(AbortRequest(id=serial))
        if stream.open_answers:
            self._observer.finished("abort", time.monotonic() - stream.submitted_at)
            stream.end()

    def abort(self, request_id: str) -> bool:
        """Stop one request by id, those submitted by one name, or all with "". Their readers see finish_reason "abort".
        False: there is none."""
        found = [
            i for i in self._serials if request_id in ("", i, self._routes[self._serials[i]].stream.name)
        ]
        for i in found:
            self._tell(AbortRequest(id=self._serials[i]))
            stream = self._routes[self._serials[i]].stream
            for index in stream.open_indices(i):
                stream.push(TokenOutput(id=i, index=index, text="", token_ids=[], finish_reason="abort"))
        return bool(found)

    async def flush_cache(self) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tell(FlushCache())
        self._flushes.append(done)
        await done

    async def record_experts(self, action: Literal["start", "stop", "dump"]) -> ExpertsRecorded:
        """Raises RequestError (nothing is recorded), ApiError 500 (a file cannot be written), EngineError."""
        done: asyncio.Future[ExpertsRecorded] = asyncio.get_running_loop().create_future()
        self._tell(RecordExperts(action=action))
        self._recordings.append(done)
        answer = await done
        if answer.error is None:
            return answer
        if answer.fault == "request":
            raise RequestError(answer.error)
        raise ApiError(500, answer.error, kind="server_error", code="not_recorded")

    async def look_at_experts(self) -> ExpertTraffic:
        """Answered between two steps. Raises EngineError."""
        done: asyncio.Future[ExpertTraffic] = asyncio.get_running_loop().create_future()
        self._tell(LookAtExperts())
        self._looks.append(done)
        return await done

    def deliver(self, message: FromEngine) -> None:
        """Take one message from the engine."""
        match message:
            case StepOutputs(outputs=outputs):
                for output in outputs:
                    route = self._routes.get(output.id)
                    if route is not None:
                        self._push(route, output)
            case EngineStats():
                self.stats = message
            case RequestRefused():
                self._refused(message)
            case CacheFlushed():
                flush = self._flushes.pop(0)
                if not flush.done():  # its client may have left
                    flush.set_result(None)
            case ExpertsRecorded():
                recording = self._recordings.pop(0)
                if not recording.done():
                    recording.set_result(message)
            case ExpertTraffic():
                look = self._looks.pop(0)
                if not look.done():
                    look.set_result(message)
            case _:
                raise EngineError(f"unexpected message from the engine: {type(message).__name__}")

    def _push(self, route: _Route, output: TokenOutput) -> None:
        route.stream.push(msgspec.structs.replace(output, id=route.request_id))
        if route.stream.overflown:
            self.release(route.stream)

    def _refused(self, message: RequestRefused) -> None:
        route = self._routes.get(message.id)
        if route is None:
            return
        error: TandemError = EngineError(message.message)
        if message.fault == "request":
            error = RequestError(message.message, message.param)
        elif message.fault == "busy":
            error = BusyError(message.message)
        route.stream.fail(error, route.request_id)

    def _tell(self, message: ToEngine) -> None:
        if self._send is None:
            raise EngineError(self._why_down)
        self._send(message)


def encode(message: ToEngine) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> FromEngine:
    return _decoder.decode(data)


_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
