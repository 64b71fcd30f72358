"""The FastAPI application: routes, authentication, errors, OpenAPI."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tandem
from tandem.server import errors, openai_chat, openai_completions, sglang_control, sglang_generate
from tandem.server.body import body_schema
from tandem.server.errors import ApiError, ErrorBody, error_response
from tandem.server.openai_schema import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ModelCard,
    ModelList,
)
from tandem.server.sglang_schema import AbortBody, SglangAnswer, SglangRequest
from tandem.server.state import ServerState

_OPEN_PATHS = {"/health"}  # without a key: load balancers ask it
_SCHEMA_TYPES = [
    ChatRequest, CompletionRequest, SglangRequest, AbortBody,
    ChatCompletion, Completion, SglangAnswer, ModelList, ErrorBody,
]  # fmt: skip
_REFUSALS = {
    400: "The request is wrong; the message says where", 401: "Key missing or wrong", 404: "Unknown model",
    413: "Body too large", 429: "Too many requests are waiting", 503: "The engine is not ready",
}  # fmt: skip


def create_app(state: ServerState) -> FastAPI:
    app = FastAPI(title="Tandem", version=tandem.__version__, redoc_url=None)
    errors.install(app)
    _add_openai_routes(app, state)
    _add_own_routes(app, state)
    app.include_router(sglang_control.routes(state))
    app.add_middleware(Gate, state=state)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models", openapi_extra=_answers(ModelList))
    async def models() -> Response:
        return _json(ModelList([_card(state)]))

    @app.get("/v1/models/{model_id:path}", openapi_extra=_answers(ModelCard))
    async def model(model_id: str) -> Response:
        state.check_model(model_id)
        return _json(_card(state))

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest) | _answers(ChatCompletion))
    async def chat_completions(http: Request) -> Response:
        return await openai_chat.chat(state, http)

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionRequest) | _answers(Completion))
    async def completions(http: Request) -> Response:
        return await openai_completions.complete(state, http)


def _add_own_routes(app: FastAPI, state: ServerState) -> None:
    @app.post(
        "/generate", openapi_extra=body_schema(SglangRequest) | _answers(SglangAnswer | list[SglangAnswer])
    )
    async def generate(http: Request) -> Response:
        return await sglang_generate.generate(state, http)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=PlainTextResponse)
    async def index() -> Response:
        text = f"Tandem {tandem.__version__} serves {state.model_name}.\nRoutes: /docs. Chat: kt chat\n"
        return Response(text, media_type="text/plain; charset=utf-8")


def _card(state: ServerState) -> ModelCard:
    length = state.engine.plan.context_length
    return ModelCard(state.model_name, state.started_at, length, root=state.config.model)


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


class Gate:
    """Outermost layer: checks the key, counts what is in progress, counts statuses. Plain ASGI: no cost per chunk."""

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
            await app(scope, receive, self._counting(send))
        finally:
            self._state.http_active -= 1
            self._state.metrics.http_active.dec()

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


def _answers(kind: Any) -> dict[str, Any]:
    """OpenAPI fragment: what a route answers. A streamed answer is text/event-stream."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    body: dict[str, Any] = {"application/json": {"schema": schema}}
    return {"responses": {"200": {"description": "OK", "content": body | {"text/event-stream": {}}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, components = msgspec.json.schema_components(
            _SCHEMA_TYPES, ref_template="#/components/schemas/{name}"
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        _document_refusals(schema)
        app.openapi_schema = schema
    return app.openapi_schema


def _document_refusals(schema: dict[str, Any]) -> None:
    """Every route can refuse, and always in the same shape; FastAPI's own 422 never happens."""
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    for methods in schema["paths"].values():
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status, text in _REFUSALS.items():
                responses[str(status)] = {"description": text, "content": body}
