"""The front's own routes: what it is, and what its models are. None of them loads a model unless it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

import tandem
from tandem.errors import EngineError
from tandem.server.body import decode, json_response, read_body
from tandem.server.errors import ApiError, as_api_error
from tandem.server.front import lists
from tandem.server.front.child import Life
from tandem.server.front.state import FrontState
from tandem.server.ollama.routes import INTERFACE
from tandem.server.page.routes import PageFiles

Handler = Callable[[Request], Awaitable[Response]]


class FrontRoutes:
    """`routes` by method and path."""

    def __init__(self, front: FrontState) -> None:
        self._front, self._models, self._page = front, front.models, PageFiles()
        self.routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health, ("GET", "/ping"): self._health, ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): self._version, ("GET", "/api/version"): self._interface,
            ("GET", "/favicon.ico"): self._nothing, ("GET", "/"): self._index, ("GET", "/tandem/live"): self._live,
            ("GET", "/v1/models"): self._cards, ("GET", "/models"): self._cards, ("GET", "/api/tags"): self._tags,
            ("GET", "/api/ps"): self._ps, ("POST", "/api/show"): self._show, ("GET", "/running"): self._running,
            ("GET", "/api/v0/models"): self._lm_studio, ("GET", "/unload"): self._unload_all,
            ("POST", "/unload"): self._unload_all, ("POST", "/models/load"): self._load,
            ("POST", "/models/unload"): self._unload, ("POST", "/resume_memory_occupation"): self._load,
            ("POST", "/release_memory_occupation"): self._unload,
        }  # fmt: skip

    async def _health(self, http: Request) -> Response:
        return json_response({"status": "ok"})

    async def _nothing(self, http: Request) -> Response:
        return Response(status_code=204)

    async def _version(self, http: Request) -> Response:
        return json_response({"version": tandem.__version__})

    async def _interface(self, http: Request) -> Response:
        return json_response({"version": INTERFACE})

    async def _metrics(self, http: Request) -> Response:
        text, media_type = await self._front.metrics.render(http.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": media_type})

    async def _cards(self, http: Request) -> Response:
        cards = [lists.card(child, self._front.started_at) for child in self._models.all()]
        return json_response({"object": "list", "data": cards})

    def one_card(self, path: str) -> Response:
        dialect, _, name = path.partition("/models/")
        child = self._models.named(name)
        card = lists.lm_studio(child) if dialect == "/api/v0" else lists.card(child, self._front.started_at)
        return json_response(card)

    async def _tags(self, http: Request) -> Response:
        return json_response({"models": [lists.tag(c, self._front.started_at) for c in self._models.all()]})

    async def _ps(self, http: Request) -> Response:
        return json_response({"models": [lists.running(child) for child in self._models.loaded()]})

    async def _running(self, http: Request) -> Response:
        """llama-swap's."""
        models = [{"model": child.name, "state": "ready"} for child in self._models.loaded()]
        return json_response({"running": models})

    async def _lm_studio(self, http: Request) -> Response:
        return json_response({"object": "list", "data": [lists.lm_studio(c) for c in self._models.all()]})

    async def _show(self, http: Request) -> Response:
        fields = _names(await read_body(http))
        return json_response(lists.shown(self._models.named(fields), self._front.started_at))

    async def _load(self, http: Request) -> Response:
        child = self._models.named(_names(await read_body(http)) or asked_model(http.scope))
        async with self._models.using(child):
            return json_response({"success": True, "model": child.name, "status": child.life.value})

    async def _unload(self, http: Request) -> Response:
        child = self._models.named(_names(await read_body(http)) or asked_model(http.scope))
        await asyncio.shield(asyncio.ensure_future(self._models.unload(child)))
        return json_response({"success": True, "model": child.name, "status": child.life.value})

    async def _unload_all(self, http: Request) -> Response:
        await asyncio.shield(asyncio.gather(*(self._models.unload(child) for child in self._models.loaded())))
        return Response("OK\n", media_type="text/plain")

    async def _index(self, http: Request) -> Response:
        names = ", ".join(child.name for child in self._models.all())
        return self._page.index(http, names)

    def page_file(self, http: Request) -> Response:
        try:
            return self._page.file(http, http.url.path.removeprefix("/page/"))
        except HTTPException as error:
            raise ApiError(404, "the page has no such file", code="unknown_route") from error

    async def _live(self, http: Request) -> Response:
        """It loads nothing."""
        name = asked_model(http.scope)
        child = self._models.named(name) if name else next(iter([*self._models.loaded(), *self._models.all()]))
        headers = {"Cache-Control": "no-store"}
        if child.life is Life.LOADED:
            try:
                status, body = await child.wire.get("/tandem/live")
                return Response(body, status, headers, media_type="application/json")
            except EngineError as error:
                raise as_api_error(error) from error
        return Response(lists.away(child), media_type="application/json", headers=headers)


class _Named(msgspec.Struct):
    model: str | None = None
    name: str | None = None


def _names(body: bytes) -> str | None:
    """The model that a small body names. Raises ApiError 400."""
    request = decode(body, _Named) if body.strip() else _Named()
    return request.model or request.name


def asked_model(scope: Scope) -> str | None:
    """`?model=`"""
    query = parse_qs(scope["query_string"].decode("latin-1"))
    return next(iter(query.get("model", [])), None)
