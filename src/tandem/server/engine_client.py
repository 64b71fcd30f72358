"""The API process's side of the engine: requests go in, token streams come out, whatever happens to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from tandem.engine.protocol import (
    AbortRequest,
    EngineStats,
    ExpertsRecorded,
    ExpertTraffic,
    GenerateRequest,
    LookAtExperts,
    RecordExperts,
    TokenOutput,
)
from tandem.errors import BusyError, EngineError, RequestError, TandemError
from tandem.server.errors import ApiError
from tandem.server.messages import CacheFlushed, FlushCache, FromEngine, RequestRefused, StepOutputs, ToEngine
from tandem.server.request_stream import RequestStream, StreamObserver
from tandem.server.sleep import Sleep

ASLEEP = "the engine is asleep, and its memory is free; a request wakes it"
WAKING = "the model is being loaded again"


T = TypeVar("T")


class _OutputRoute(NamedTuple):
    """Where an output of the engine goes."""

    stream: RequestStream
    request_id: str  # the client's


class EngineClient:
    """Routes outputs to streams by request id. `attach` and `detach` follow the engine's lives. While it is asleep
    requests wait here.

    The engine knows a request by a serial number of ours. A client may use its id again at once, and what the engine
    still says about the earlier request must not reach the new one.

    Not thread-safe: everything happens on the event loop.
    """

    def __init__(self, observer: StreamObserver, sleep_idle_seconds: float | None = None) -> None:
        self.stats = EngineStats()
        self.sleep = Sleep(sleep_idle_seconds, self._is_busy)
        self._observer = observer
        self._send: Callable[[ToEngine], None] | None = None
        self._why_down = "the engine is starting"
        self._numbers = itertools.count()
        self._serials: dict[str, str] = {}  # of the client's request ids
        self._routes: dict[str, _OutputRoute] = {}  # by serial
        self._flushes: list[asyncio.Future[None]] = []
        self._recordings: list[asyncio.Future[ExpertsRecorded]] = []
        self._looks: list[asyncio.Future[ExpertTraffic]] = []
        self.holds_recording = False  # it records experts, or no dump has written what it recorded
        self._admitted = 0
        self._wakes: list[asyncio.Future[None]] = []
        self._asleep = False
        self._waiting: dict[str, GenerateRequest] = {}  # by serial, for the engine to wake

    @property
    def ready(self) -> bool:
        """Whether an engine is there. `takes_requests` is true while it is asleep, too."""
        return self._send is not None

    @property
    def takes_requests(self) -> bool:
        return self.ready or self._asleep

    @property
    def why_down(self) -> str:
        if self._asleep:
            return WAKING if self.sleep.waking else ASLEEP
        return self._why_down

    @property
    def open_answers(self) -> int:
        """Answers that are running or waiting, over all requests."""
        return sum(stream.open_answers for stream in self._all_streams())

    def _is_busy(self) -> bool:
        """Whether the engine's end would lose something, answers to questions included."""
        questions = self._admitted or self._recordings or self._looks
        return bool(questions or self.holds_recording or self.open_answers)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Around the work for a request before it is submitted: the engine stays for it."""
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1
            self.sleep.used()

    def _all_streams(self) -> set[RequestStream]:
        return {route.stream for route in self._routes.values()}

    def attach(self, send: Callable[[ToEngine], None]) -> None:
        """The engine is ready; from now on messages go through `send`. What has waited for it goes first."""
        self._send, self._asleep = send, False
        for request in self._waiting.values():
            send(request)
        self._waiting = {}
        for woken in self._wakes:
            _resolve(woken, None)
        self._wakes = []

    def detach(self, why: str) -> None:
        """The engine is gone: every request in flight ends now with an `EngineError`."""
        self._why_down, self._asleep = why, False
        streams = self._all_streams()
        self._routes, self._serials, self._waiting = {}, {}, {}
        for stream in streams:
            stream.fail(EngineError(why))
        wakes, self._wakes = self._wakes, []
        self._lose_engine(why, wakes)

    def fall_asleep(self) -> None:
        """The engine ends, since nobody uses it: requests wait for the next one, and `sleep` hears of them."""
        self._asleep = True
        for flush in self._flushes:
            _resolve(flush, None)
        self._lose_engine(ASLEEP)

    def _lose_engine(self, why: str, waiting: Sequence[asyncio.Future[Any]] = ()) -> None:
        """Questions to it end with an EngineError, as do those in `waiting`."""
        self._send, self.holds_recording = None, False
        self.stats = EngineStats()
        questions: list[asyncio.Future[Any]] = [*waiting, *self._flushes, *self._recordings, *self._looks]
        self._flushes, self._recordings, self._looks = [], [], []
        for answer in questions:
            if not answer.done():
                answer.set_exception(EngineError(why))

    async def wake(self) -> None:
        """Until the engine takes requests; a release that waits is over. Raises EngineError: it cannot be loaded."""
        self.sleep.stay()
        if self.ready:
            return
        if not self._asleep:
            raise EngineError(self._why_down)
        self.sleep.wake()
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wakes.append(woken)
        await woken

    def submit(
        self, requests: Sequence[GenerateRequest], name: str = "", probe: bool = False
    ) -> RequestStream:
        """`abort` then takes `name` for all of them. Raises EngineError when no engine is ready or asleep,
        RequestError when an id is already in use."""
        for request in requests:
            if request.id in self._serials:
                raise RequestError(f"the request id {request.id!r} is in use; send another", "rid")
        stream = RequestStream(requests, self._observer, name, probe)
        for request in requests:
            serial = str(next(self._numbers))
            self._generate(msgspec.structs.replace(request, id=serial))
            self._serials[request.id] = serial
            self._routes[serial] = _OutputRoute(stream, request.id)
        return stream

    def release(self, stream: RequestStream) -> None:
        """The reader is done with `stream`; answers that still run are aborted and their pages come back."""
        for request_id in stream.position:
            serial = self._serials.get(request_id, "")
            if serial not in self._routes or self._routes[serial].stream is not stream:
                continue
            del self._serials[request_id], self._routes[serial]
            if stream.is_open(request_id):
                self._abort(serial)
        if stream.open_answers:
            self._observer.finished("abort", time.monotonic() - stream.submitted_at)
            stream.end()
        if stream.probe:
            self.sleep.look()
        else:
            self.sleep.used()

    def abort(self, request_id: str) -> bool:
        """Stop one request by id, those submitted by one name, or all with "". Their readers see finish_reason "abort".
        False: there is none."""
        ids = [
            i for i in self._serials if request_id in ("", i, self._routes[self._serials[i]].stream.name)
        ]
        for i in ids:
            self._abort(self._serials[i])
            stream = self._routes[self._serials[i]].stream
            for index in stream.open_indices(i):
                stream.push(TokenOutput(id=i, index=index, text="", token_ids=[], finish_reason="abort"))
        return bool(ids)

    def _generate(self, request: GenerateRequest) -> None:
        """request: with a serial as its id."""
        if self._asleep:
            self._waiting[request.id] = request
            self.sleep.wake()
        else:
            self._tell(request)

    def _abort(self, serial: str) -> None:
        if self._waiting.pop(serial, None) is None and self._send is not None:
            self._send(AbortRequest(id=serial))

    async def flush_cache(self) -> None:
        if self._asleep:  # its cache ended with it
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tell(FlushCache())
        self._flushes.append(done)
        await done

    async def record_experts(self, action: Literal["start", "stop", "dump"]) -> ExpertsRecorded:
        """Wakes the engine. Raises RequestError (nothing is recorded), ApiError 500 (a file cannot be written),
        EngineError."""
        with self.admitted():
            if action == "start" or not self.ready:
                await self.wake()
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
        """Take one message from the engine. One that is ending has nothing to say any more."""
        if self._asleep:
            return
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
                _resolve(self._flushes.pop(0), None)
            case ExpertsRecorded():
                if message.error is None:
                    self.holds_recording = message.recording or message.file is None
                _resolve(self._recordings.pop(0), message)
                self.sleep.look()
            case ExpertTraffic():
                _resolve(self._looks.pop(0), message)
                self.sleep.look()
            case _:
                raise EngineError(f"unexpected message from the engine: {type(message).__name__}")

    def _push(self, route: _OutputRoute, output: TokenOutput) -> None:
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
            raise EngineError(self.why_down)
        self._send(message)


def _resolve(answer: asyncio.Future[T], value: T) -> None:
    """Unless its client has left."""
    if not answer.done():
        answer.set_result(value)


def encode(message: ToEngine) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> FromEngine:
    return _decoder.decode(data)


_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
