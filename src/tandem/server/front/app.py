"""`FrontApp`: the ASGI application of a front. Few routes are its own; what names a model goes to its server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tandem.server.anthropic import errors as anthropic_errors
from tandem.server.body import json_response, read_body
from tandem.server.errors import ApiError, error_response, unavailable
from tandem.server.front.child import Child, Life
from tandem.server.front.dialects import OLLAMA, FrontFields, chunk, is_empty, needs_model, wish_of
from tandem.server.front.proxy import Proxy, pass_on
from tandem.server.front.routes import FrontRoutes, asked_model
from tandem.server.front.state import FrontState
from tandem.server.guard.bodies import UnfinishedBodies
from tandem.server.info.other_routes import NO_ADVICE, hint
from tandem.server.ollama import errors as ollama_errors
from tandem.server.ollama.keep_alive import keep_seconds

UPSTREAM = "/upstream/"
ERROR_FORMS = {"/v1/messages": anthropic_errors.error_body, "/api/": ollama_errors.error_body}
_OF_ALL = ("/abort_request", "/flush_cache")


class FrontApp:
    """`state` is as Starlette's: bodies that arrive, and how each dialect says errors."""

    def __init__(self, front: FrontState) -> None:
        self.state = SimpleNamespace(bodies=UnfinishedBodies(), error_forms=ERROR_FORMS)
        self._front, self._models = front, front.models
        self._proxy = Proxy(front.models)
        self._own = FrontRoutes(front)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        begun = False

        async def noted(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        except Exception as error:
            if begun:
                raise
            await error_response(error, scope)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._front.draining:
            raise unavailable("the server is shutting down")
        method, path = scope["method"], scope["path"]
        if (handler := self._own.routes.get((method, path))) is not None:
            await (await handler(Request(scope, receive)))(scope, receive, send)
        elif method == "GET" and path.startswith("/page/"):
            await self._own.page_file(Request(scope, receive))(scope, receive, send)
        elif method == "GET" and path.startswith(("/v1/models/", "/api/v0/models/")):
            await self._own.one_card(path)(scope, receive, send)
        elif path.startswith(UPSTREAM):
            await self._upstream(scope, receive, send)
        else:
            await self._of_model(scope, receive, send)

    # --- what goes to a model

    async def _of_model(self, scope: Scope, receive: Receive, send: Send, name: str | None = None) -> None:
        path, request = scope["path"], Request(scope, receive)
        _refuse_misspelt(path)
        body = await read_body(request) if scope["method"] == "POST" else b""
        wish = wish_of(body) if needs_model(path) or path in _OF_ALL else FrontFields()
        name = name or wish.model or asked_model(scope)
        if path.startswith("/v1/responses/") and scope["method"] in ("GET", "DELETE") and name is None:
            await self._stored(scope, send)
        elif path in _OF_ALL and name is None:
            await self._tell_all(scope, receive, send, body)
        elif not needs_model(path) or scope["method"] != "POST":
            await pass_on(self._loaded(name), scope, send, body)
        else:
            await self._answered(self._models.named(name), path, scope, receive, send, body, wish)

    async def _answered(
        self, child: Child, path: str, scope: Scope, receive: Receive, send: Send, body: bytes, wish: FrontFields
    ) -> None:
        """Ollama's `keep_alive` is the front's: it counts from the answer's end, and a refused body changes nothing."""
        seconds = keep_seconds(wish.keep_alive) if path in OLLAMA else None
        if seconds == 0 and is_empty(path, wish):
            child.sleep.soon()
            unloads = chunk(path, child.name) | {"done": True, "done_reason": "unload"}
            return await json_response(unloads)(scope, receive, send)
        statuses = list[int]()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        await self._proxy.answer(child, scope, noted, body, wish)
        if seconds is not None and child.sleep.by_itself and statuses and statuses[0] < 400:
            child.sleep.keep(seconds)

    def _loaded(self, name: str | None) -> Child:
        """Loaded model, for routes that only look. Raises ApiError 503, 404, 400."""
        child = self._models.named(name)
        if child.life is not Life.LOADED:
            raise unavailable(f"{child.name} is not loaded; a request for an answer loads it")
        return child

    async def _upstream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """llama-swap's way to any route of one model: /upstream/NAME/…"""
        name, _, rest = scope["path"].removeprefix(UPSTREAM).partition("/")
        path = f"/{rest}"
        inner = {**scope, "path": path, "raw_path": quote(path, safe="/%:@").encode()}
        await self._of_model(inner, receive, send, unquote(name))

    async def _stored(self, scope: Scope, send: Send) -> None:
        """A response's id names no model: the one that has it answers."""
        response: Response = error_response(ApiError(404, "no loaded model has this response", code="not_found"), scope)
        for child in self._models.loaded():
            answer = await child.wire.ask(scope["method"], scope["path"])
            status, body = await answer.head(), await answer.whole()
            if status != 404:
                response = Response(body, status, media_type="application/json")
                break
        await response(scope, _no_body, send)

    async def _tell_all(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Every loaded model."""
        answers = []
        for child in self._models.loaded():
            answer = await child.wire.ask("POST", scope["path"], [(b"content-type", b"application/json")], body)
            answers.append((await answer.head(), await answer.whole()))
        if wrong := next((each for each in answers if each[0] != 200), None):
            await Response(wrong[1], wrong[0], media_type="application/json")(scope, receive, send)
            return
        if scope["path"] == "/flush_cache":
            response = Response("The prefix caches are empty.\n", media_type="text/plain")
        else:
            response = json_response({"aborted": any(json.loads(data)["aborted"] for _, data in answers)})
        await response(scope, receive, send)


def _refuse_misspelt(path: str) -> None:
    """Raises ApiError 404 for a route of another server, or with one `/v1` too many or too few: the wait for a model
    that is not loaded would be for nothing."""
    advice = None if needs_model(path) else hint(path, needs_model)
    if advice not in (None, NO_ADVICE):
        raise ApiError(404, advice, code="unknown_route")


async def _no_body() -> Any:
    return {"type": "http.disconnect"}
