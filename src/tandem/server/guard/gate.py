"""`Gate`: the outermost layer of the application, but for what browsers ask first (CORS)."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from typing import Any, Protocol

from fastapi import FastAPI
from prometheus_client import Gauge
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.flags.engine_config import EngineConfig
from tandem.server.errors import ApiError, error_response
from tandem.server.fields import IGNORED_HEADER
from tandem.server.guard.bodies import HELD, HeldBodies
from tandem.server.guard.connection import Deadline, run_while_wanted
from tandem.server.guard.origins import ANY, Origins
from tandem.server.guard.request_log import RequestNote
from tandem.server.page.routes import is_public

_OPEN_PATHS = {"/health", "/ping", "/favicon.ico"}  # without a key: load balancers and browsers ask them


class GateMetrics(Protocol):
    http_active: Gauge

    def responded(self, status: int) -> None: ...


class Gated(Protocol):
    """Part of a server's state that the gate needs."""

    http_active: int
    @property
    def draining(self) -> bool: ...

    @property
    def config(self) -> EngineConfig: ...
    @property
    def metrics(self) -> GateMetrics: ...


def install(app: FastAPI, state: Gated) -> None:
    """Around everything that the application has so far."""
    app.add_middleware(Gate, state=state)
    if (cors := _cors(state.config)) is not None:
        app.add_middleware(CORSMiddleware, **cors)


def around(app: ASGIApp, state: Gated) -> ASGIApp:
    """As `install`, for an application that is no FastAPI."""
    cors, gate = _cors(state.config), Gate(app, state)
    return gate if cors is None else CORSMiddleware(gate, **cors)


def _cors(config: EngineConfig) -> dict[str, Any] | None:
    """None: browsers may use it from its own pages alone."""
    if config.allowed_origins is None:
        return None
    return {
        "allow_origins": config.allowed_origins, "allow_methods": [ANY], "allow_headers": [ANY],
        "expose_headers": [IGNORED_HEADER, "Retry-After", "x-request-id"],
    }  # fmt: skip


class Gate:
    """Checks origin and key, counts what is in progress, counts statuses. Plain ASGI: no cost per chunk."""

    def __init__(self, app: ASGIApp, state: Gated) -> None:
        self._app = app
        self._state = state
        self._held = HeldBodies(state.config.max_queued_bytes)
        self._origins = Origins(state.config)
        key = state.config.api_key
        self._expected = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = RequestNote(scope)
        scope["state"][HELD] = self._held
        scope, send = _tolerant(scope, note.sending(send))
        self._state.http_active += 1
        self._state.metrics.http_active.inc()
        try:
            refusal = self._refusal(scope)
            app = self._app if refusal is None else error_response(refusal, scope)
            await run_while_wanted(app, scope, receive, self._counting(send), self._deadline(scope))
        except asyncio.CancelledError:
            if not self._state.draining:  # else its client did not read what was to end it
                raise
        finally:
            self._held.let_go(scope)
            self._state.http_active -= 1
            self._state.metrics.http_active.dec()
            note.tell()

    def _deadline(self, scope: Scope) -> Deadline | None:
        """Also for those who answer: `request.state.deadline`."""
        seconds = self._state.config.request_timeout
        if seconds is None:
            return None
        deadline = Deadline(asyncio.get_running_loop().time() + seconds, seconds)
        scope.setdefault("state", {})["deadline"] = deadline
        return deadline

    def _refusal(self, scope: Scope) -> ApiError | None:
        if scope["path"] in _OPEN_PATHS:
            return None
        try:
            self._origins.check(scope)
        except ApiError as error:
            return error
        if self._expected is None or is_public(scope):
            return None
        right = [hmac.compare_digest(key, self._expected) for key in _keys(scope)]
        return None if any(right) else _unauthorized()

    def _counting(self, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._state.metrics.responded(message["status"])
            await send(message)

        return counted


def _tolerant(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """A slash at the path's end changes nothing. HEAD is GET without the body, on every route."""
    path = scope["path"].rstrip("/") or "/"
    if scope["method"] != "HEAD":
        return (scope if path == scope["path"] else {**scope, "path": path}), send

    async def without_body(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return {**scope, "path": path, "method": "GET"}, without_body


def _keys(scope: Scope) -> Iterator[bytes]:
    """Keys in OpenAI's header and Anthropic's. The letter case of `Bearer` does not matter (RFC 9110, 11.1)."""
    for name, value in scope["headers"]:
        scheme, _, token = value.partition(b" ")
        if name == b"x-api-key":
            yield value
        elif name == b"authorization" and scheme.lower() == b"bearer":
            yield token.strip(b" ")


def _unauthorized() -> ApiError:
    message = "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY"
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
