"""`Proxy`: a request goes to its model's server, and the answer comes back as it is. A stream says that it waits while
the model is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Scope, Send

from tandem.errors import EngineError, TandemError
from tandem.server.errors import as_api_error, form_of
from tandem.server.fields import IGNORED_HEADER
from tandem.server.front.child import Child, Life
from tandem.server.front.dialects import (
    END_BYTES,
    OLLAMA,
    FrontFields,
    begins_to_end,
    failure,
    is_stream,
    media_type,
    streams,
    waiting,
)
from tandem.server.front.models import Models
from tandem.server.front.wire import LOST, ProxiedAnswer, Unreached
from tandem.server.guard.request_log import ID_HEADER
from tandem.server.limits import WAITING_SECONDS

Headers = list[tuple[bytes, bytes]]

END_SECONDS = 1.0  # for the end of a process whose connection was lost

# The front has checked who may ask; and both ends of each connection say for themselves how it is kept.
_NOT_SENT = frozenset((
    b"host", b"authorization", b"x-api-key", b"origin", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade",
    b"transfer-encoding", b"content-length", b"expect", b"cookie", ID_HEADER,
))  # fmt: skip
_NOT_RETURNED = frozenset((
    b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id",
))  # fmt: skip


class Proxy:
    def __init__(self, models: Models) -> None:
        self.models = models

    async def answer(self, child: Child, scope: Scope, send: Send, body: bytes, wish: FrontFields) -> None:
        """Loads the model. Raises ApiError, EngineError while nothing has been sent."""
        out = Out(scope["path"], child.name, scope, send, streams(scope["path"], wish))
        try:
            if not await self._try(child, scope, out, body):  # its process died a moment ago
                await child.noticed(None)
                if not await self._try(child, scope, out, body):
                    raise EngineError(LOST)
        except TandemError as error:
            await out.fail(error)

    async def _try(self, child: Child, scope: Scope, out: Out, body: bytes) -> bool:
        """False: nobody has heard the request."""
        await self._acquire(child, out)
        try:
            await _forward(child, scope, out, body)
        except Unreached:
            return False
        finally:
            child.done()
        return True

    async def _acquire(self, child: Child, out: Out) -> None:
        """A client that leaves cancels this; the load goes on."""
        if child.life is Life.LOADED:
            child.use()
            return
        acquiring = asyncio.create_task(self.models.acquire(child))
        try:
            while not (await asyncio.wait({acquiring}, timeout=WAITING_SECONDS))[0]:
                await out.wait()
        except BaseException:
            acquiring.cancel()
            if await _succeeded(acquiring):
                child.done()
            raise
        acquiring.result()


async def pass_on(child: Child, scope: Scope, send: Send, body: bytes) -> None:
    """As `Proxy.answer`, of a model that is loaded. Raises EngineError."""
    await _forward(child, scope, Out(scope["path"], child.name, scope, send, False), body)


async def _forward(child: Child, scope: Scope, out: Out, body: bytes) -> None:
    answer = None
    try:
        answer = await child.wire.ask(scope["method"], target_of(scope), sent_headers(scope), body)
        await _return(answer, child, out)
    except Unreached:
        raise
    except TandemError as error:
        await child.noticed(END_SECONDS)  # or the client's next request would find a process that is gone
        await out.fail(error)
    except BaseException:
        if answer is not None:
            answer.close()
        raise


async def _return(answer: ProxiedAnswer, child: Child, out: Out) -> None:
    status = await answer.head()
    headers = _returned(answer.headers, child)
    kind = next((value for name, value in headers if name == b"content-type"), b"")
    if not is_stream(kind):
        await out.whole(status, headers, await answer.whole())
        return
    await out.begin(status, headers)
    while data := await answer.part():
        await out.part(data)
    await out.end()


async def _succeeded(task: asyncio.Task[None]) -> bool:
    await asyncio.wait({task})
    return not task.cancelled() and task.exception() is None


class Out:
    """The answer to the front's client. `begun`: it has a status. `sent`: it has more than that it waits."""

    def __init__(self, path: str, model: str, scope: Scope, send: Send, may_wait: bool) -> None:
        """may_wait: whether it is a stream, which can begin before its model is there."""
        self.model, self.may_wait, self.begun, self.sent = model, may_wait, False, False
        self._path, self._scope, self._send = path, scope, send
        self._last, self._ends = b"\n", False

    async def wait(self) -> None:
        if not self.may_wait:
            return
        kind = (b"content-type", f"{media_type(self._path)}; charset=utf-8".encode())
        await self.begin(200, [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        await self._more(waiting(self._path, self.model))

    async def begin(self, status: int, headers: Headers) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, data: bytes) -> None:
        self.sent = True
        last = self._last + data
        self._ends, self._last = self._ends or begins_to_end(self._path, last), last[-END_BYTES:]
        await self._more(data)

    async def _more(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Behind comments it can only be a refusal."""
        if self.begun:
            await self.end(failure(self._path, body))
            return
        await self.begin(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def fail(self, error: TandemError) -> None:
        """Raises `error` where it can have a status of its own. Behind a stream's last event it says nothing."""
        if not self.begun:
            raise error
        if self._ends and self._last.endswith(b"\n" if self._path in OLLAMA else b"\n\n"):
            return await self.end()
        form = form_of(self._scope["app"], self._path)
        await self.end(failure(self._path, form(as_api_error(error))))


def target_of(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0]
    return f"{path}?{query}" if query else path


def sent_headers(scope: Scope) -> Headers:
    """With the id that the front's log has."""
    own = [(ID_HEADER, scope["state"]["request_id"])]
    return [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT] + own


def returned_headers(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Those of a model's server that its client gets."""
    return [(name, value) for name, value in headers if name not in _NOT_RETURNED]


def _returned(headers: Sequence[tuple[bytes, bytes]], child: Child) -> Headers:
    """The model's server does not know `keep_alive`, but the front does."""
    fields = returned_headers(headers)
    if not child.sleep.by_itself:
        return fields
    ignored = IGNORED_HEADER.encode()
    pairs = [(name, _without_keep_alive(value) if name == ignored else value) for name, value in fields]
    return [(name, value) for name, value in pairs if value or name != ignored]


def _without_keep_alive(names: bytes) -> bytes:
    return b", ".join(name for name in names.split(b", ") if name != b"keep_alive")
