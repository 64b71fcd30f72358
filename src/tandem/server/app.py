"""The FastAPI application: routes, authentication, errors, OpenAPI."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.responses import HTMLResponse, PlainTextResponse

import tandem
from tandem.server import errors, openai_chat, openai_completions, sglang_control, sglang_generate
from tandem.server.anthropic import errors as anthropic_errors
from tandem.server.anthropic import routes as anthropic_routes
from tandem.server.anthropic import schema as anthropic_schema
from tandem.server.body import answers, body_schema, json_response, one_given
from tandem.server.chat.openai.schema import ChatCompletion, ChatRequest
from tandem.server.errors import ErrorBody
from tandem.server.guard import gate
from tandem.server.guard.bodies import UnfinishedBodies
from tandem.server.info import model_routes
from tandem.server.info import routes as info_routes
from tandem.server.info import schema as info_schema
from tandem.server.info.docs_page import docs_page
from tandem.server.info.openapi import document_nulls, document_ranges, structs_in
from tandem.server.ollama import errors as ollama_errors
from tandem.server.ollama import routes as ollama_routes
from tandem.server.ollama import schema as ollama_schema
from tandem.server.openai_schema import (
    SEEING,
    Architecture,
    Capabilities,
    CompletionRequest,
    ModelCard,
    ModelList,
    ModelStatus,
    TextCompletion,
)
from tandem.server.page import routes as page
from tandem.server.responses import routes as responses_routes
from tandem.server.responses import schema as responses_schema
from tandem.server.sglang_schema import AbortBody, MemoryBody, SglangAnswer, SglangRequest
from tandem.server.state import ServerState

_SENT_TYPES = [
    ChatRequest, CompletionRequest, SglangRequest, AbortBody, anthropic_schema.MessagesRequest,
    anthropic_schema.CountRequest, info_schema.TokenizeBody, info_schema.DetokenizeBody,
    responses_schema.ResponsesRequest, ollama_schema.ChatBody, ollama_schema.GenerateBody, ollama_schema.ShowBody,
    MemoryBody,
]  # fmt: skip
_SCHEMA_TYPES = [
    *_SENT_TYPES, ChatCompletion, TextCompletion, SglangAnswer, ModelList, ErrorBody, anthropic_schema.MessageResponse,
    anthropic_schema.TokenCountBody, anthropic_schema.AnthropicError, info_schema.Tokens, info_schema.Text,
    info_schema.Load, info_schema.Loads, info_schema.Props, info_schema.LmStudioModel, info_schema.LmStudioModels,
    responses_schema.Response, responses_schema.InputTokens, responses_schema.Deleted, ollama_schema.StreamLine,
    ollama_schema.Tags, ollama_schema.RunningModels, ollama_schema.Show, ollama_schema.OllamaError,
]  # fmt: skip
_BODIES = (
    "ChatRequest", "CompletionRequest", "SglangSampling", "MessagesRequest", "ResponsesRequest", "Options",
)  # fmt: skip
_REFUSALS = {
    400: "The request is wrong; the message says where", 401: "Key missing or wrong",
    403: "A web page or a host that is not allowed", 404: "Unknown model", 408: "The request came too slowly",
    413: "Body too large", 414: "URL too long", 415: "The body is compressed", 429: "Too many requests are waiting",
    431: "Headers too large", 503: "The engine is not ready", 504: "Longer than --request-timeout",
}  # fmt: skip
_SGLANG_BODY = body_schema(SglangRequest, oneOf=one_given("text", "input_ids"))
_ERROR_FORMS = {"/v1/messages": anthropic_errors.error_body, "/api/": ollama_errors.error_body}
_ERROR_SCHEMAS = {"/v1/messages": "AnthropicError", "/api/": "OllamaError"}


def create_app(state: ServerState) -> FastAPI:
    app = FastAPI(
        title="Tandem", version=tandem.__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.bodies = UnfinishedBodies()
    errors.install(app, _ERROR_FORMS)
    _add_openai_routes(app, state)
    _add_own_routes(app, state)
    app.include_router(sglang_control.routes(state))
    app.include_router(anthropic_routes.routes(state))
    app.include_router(info_routes.routes(state))
    app.include_router(model_routes.routes(state))
    app.include_router(ollama_routes.routes(state))
    app.include_router(responses_routes.routes(state))
    app.include_router(page.routes(state))
    gate.install(app, state)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models", openapi_extra=answers(ModelList))
    async def models() -> Response:
        return json_response(ModelList([_card(state)]))

    @app.get("/v1/models/{model_id:path}", openapi_extra=answers(ModelCard))
    async def model(model_id: str) -> Response:
        state.check_model(model_id)
        return json_response(_card(state))

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest) | answers(ChatCompletion))
    async def chat_completions(http: Request) -> Response:
        return await openai_chat.chat(state, http)

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionRequest) | answers(TextCompletion))
    async def completions(http: Request) -> Response:
        return await openai_completions.complete(state, http)


def _add_own_routes(app: FastAPI, state: ServerState) -> None:
    @app.post(
        "/generate", openapi_extra=_SGLANG_BODY | answers(SglangAnswer | list[SglangAnswer])
    )
    async def generate(http: Request) -> Response:
        return await sglang_generate.generate(state, http)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(http: Request) -> Response:
        data, media_type = state.metrics.render(http.headers.get("accept", ""))
        return Response(data, headers={"Content-Type": media_type})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()))


def _card(state: ServerState) -> ModelCard:
    length = state.engine.plan.context_length
    status = ModelStatus("sleeping" if state.client.sleep.asleep else "loaded")
    sees = state.chat.sees
    return ModelCard(
        state.model_name, state.started_at, length, length, root=state.config.model, status=status,
        architecture=SEEING if sees else Architecture(), capabilities=Capabilities(sees),
    )  # fmt: skip


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        sent = structs_in(_SENT_TYPES)
        refs, components = msgspec.json.schema_components(
            [*sent, *_SCHEMA_TYPES], ref_template="#/components/schemas/{name}"
        )
        names = [ref["$ref"].rpartition("/")[2] for ref in refs]
        document_nulls(components, dict(zip(sent, names, strict=False)))
        document_ranges(components, _BODIES)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        _document_refusals(schema)
        app.openapi_schema = schema
    return app.openapi_schema


def _document_refusals(schema: dict[str, Any]) -> None:
    """Every route can refuse, and always in its dialect's shape; FastAPI's own 422 never happens."""
    for path, methods in schema["paths"].items():
        name = next((n for prefix, n in _ERROR_SCHEMAS.items() if path.startswith(prefix)), "ErrorBody")
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status, text in _REFUSALS.items():
                responses[str(status)] = {"description": text, "content": body}
