"""`Gate`: the outermost layer of the application."""

from __future__ import annotations

import asyncio
import hmac

from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.server.errors import ApiError, error_response
from tandem.server.guard.connection import Deadline, run_while_wanted
from tandem.server.state import ServerState

_OPEN_PATHS = {"/health", "/ping"}  # without a key: load balancers ask them


class Gate:
    """Checks the key, counts what is in progress, counts statuses. Plain ASGI: no cost per chunk."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        key = state.config.api_key
        self._expected = None if key is None else b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._state.http_active += 1
        self._state.metrics.http_active.inc()
        try:
            app = self._app if self._may_pass(scope) else _unauthorized()
            await run_while_wanted(app, scope, receive, self._counting(send), self._deadline(scope))
        finally:
            self._state.http_active -= 1
            self._state.metrics.http_active.dec()

    def _deadline(self, scope: Scope) -> Deadline | None:
        """Also for those who answer: `request.state.deadline`."""
        seconds = self._state.config.request_timeout
        if seconds is None:
            return None
        deadline = Deadline(asyncio.get_running_loop().time() + seconds, seconds)
        scope.setdefault("state", {})["deadline"] = deadline
        return deadline

    def _may_pass(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in _OPEN_PATHS:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)

    def _counting(self, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._state.metrics.responded(message["status"])
            await send(message)

        return counted


def _unauthorized() -> Response:
    message = "the API key is missing or wrong; send Authorization: Bearer KEY"
    headers = {"WWW-Authenticate": "Bearer"}
    error = ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
    return error_response(error)
