"""`ReplicaFront`: the address of all models on Ray Serve. A request goes to a replica of its model; one that is lost
before it sent anything is asked again elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.errors import EngineError, TandemError
from tandem.flags.engine_config import EngineConfig
from tandem.ray.choice import key_of, prompt_of
from tandem.ray.engine import AnswerHead, ReplicaRequest
from tandem.server.body import json_response, read_body
from tandem.server.errors import ApiError, error_response, overloaded
from tandem.server.front.app import ERROR_FORMS
from tandem.server.front.dialects import is_stream, needs_model, streams
from tandem.server.front.models_file import ModelEntry, entry_named
from tandem.server.front.proxy import Out, returned_headers, sent_headers, target_of
from tandem.server.front.state import GateCounters
from tandem.server.guard.bodies import UnfinishedBodies
from tandem.server.guard.gate import around
from tandem.server.limits import WAITING_SECONDS

TRIES = 3
LOST = "the replica ended before its answer did; try again"
_BUSY = (429, 503)
Handler = Callable[[Request], Awaitable[Response]]


class ReplicaFront:
    """A deployment of Ray Serve, and its ingress."""

    def __init__(
        self, engines: Mapping[str, Any], entries: Sequence[ModelEntry], config: EngineConfig
    ) -> None:
        """engines: handles of deployments by the model's name. config: keys, origins and `request_timeout`."""
        self._app = around(RayApp(engines, entries, state := RayState(config)), state)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class RayState:
    """Implements `Gated`."""

    draining = False  # Ray sends nothing to a front that ends

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.metrics, self.http_active = config, GateCounters(), 0
        self.started_at = int(time.time())


class RayApp:
    """ASGI. Errors are each dialect's own."""

    def __init__(self, engines: Mapping[str, Any], entries: Sequence[ModelEntry], state: RayState) -> None:
        self.state = SimpleNamespace(bodies=UnfinishedBodies(), error_forms=ERROR_FORMS)
        self._engines, self._entries, self._front = engines, entries, state
        self._routes: dict[str, Handler] = {
            "/health": self._health, "/ping": self._health, "/metrics": self._metrics, "/v1/models": self._cards,
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await _live(scope, receive, send)
        scope["app"] = self
        out = Out(scope["path"], "", scope, send, False)
        try:
            await self._answer(scope, receive, send, out)
        except Exception as error:
            if out.begun:
                raise
            await error_response(error, scope)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, out: Out) -> None:
        request, path = Request(scope, receive), scope["path"]
        if scope["method"] == "GET" and (handler := self._routes.get(path)) is not None:
            await (await handler(request))(scope, receive, send)
            return
        if scope["method"] != "POST" or not needs_model(path):
            raise ApiError(404, "behind Ray Serve there are routes that answer alone", code="unknown_route")
        body = await read_body(request)
        prompt = prompt_of(body)
        entry = entry_named(self._entries, prompt.model)
        out.model, out.may_wait = entry.name, streams(path, prompt)
        query = ReplicaRequest("POST", target_of(scope), sent_headers(scope), body)
        await _answered(self._engines[entry.name], query, key_of(prompt), out)

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        text, media_type = self._front.metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": media_type})

    async def _cards(self, request: Request) -> Response:
        cards = [
            {"id": entry.name, "object": "model", "created": self._front.started_at, "owned_by": "tandem",
             "root": entry.path, "aliases": list(entry.aliases)} for entry in self._entries
        ]  # fmt: skip
        return json_response({"object": "list", "data": cards})


async def _live(scope: Scope, receive: Receive, send: Send) -> None:
    """Ray waits for the application to say that it has begun; nothing else than HTTP is served."""
    while scope["type"] == "lifespan":
        begun = (await receive())["type"] == "lifespan.startup"
        await send({"type": f"lifespan.{'startup' if begun else 'shutdown'}.complete"})
        if not begun:
            return


async def _answered(engine: Any, query: ReplicaRequest, key: bytes, out: Out) -> None:
    """Raises ApiError, EngineError while nothing was sent."""
    avoid: tuple[str, ...] = ()
    for left in reversed(range(TRIES)):
        try:
            busy = await _once(engine, query, key, avoid, out, last=not left)
        except BackPressureError:
            return await out.fail(overloaded("too many requests wait for this model; try again later"))
        except (RayError, RayServeException) as error:
            if out.sent or not left:
                return await out.fail(EngineError(LOST) if not isinstance(error, TandemError) else error)
            continue
        if busy is None:
            return
        avoid = (*avoid, busy)


async def _once(
    engine: Any, query: ReplicaRequest, key: bytes, avoid: tuple[str, ...], out: Out, *, last: bool
) -> str | None:
    """None: it is answered. Else the replica that has no place for it, of which nothing was sent. Raises RayError."""
    parts = engine.options(stream=True).answer.remote(query, key=key, avoid=avoid)
    head = await _first(parts, out)
    kind = next((value for name, value in head.headers if name == b"content-type"), b"")
    if head.status in _BUSY and not last:
        parts.cancel()
        return head.replica
    headers = returned_headers(head.headers)
    if is_stream(kind):
        await out.begin(head.status, headers)
        async for part in parts:
            await out.part(part)
        await out.end()
    else:
        await out.whole(head.status, headers, b"".join([part async for part in parts]))
    return None


async def _first(parts: AsyncIterator[Any], out: Out) -> AnswerHead:
    """A stream says meanwhile that it waits: for a replica, too."""
    first_part = asyncio.ensure_future(anext(parts))
    try:
        while not (await asyncio.wait({first_part}, timeout=WAITING_SECONDS))[0]:
            await out.wait()
    except BaseException:
        first_part.cancel()
        raise
    head: AnswerHead = first_part.result()
    return head
