"""/tokenize, /detokenize, /version, /ping, /get_load, /v1/loads, and what is refused with a reason."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

import tandem
from tandem.engine.protocol import SamplingSettings
from tandem.errors import RequestError
from tandem.server.body import answers, body_schema, json_response, one_given, read_fields
from tandem.server.chat.openai.request import conversation_of
from tandem.server.chat.openai.schema import ChatRequest
from tandem.server.errors import ApiError, named
from tandem.server.fields import name_ignored, read_as, read_fields_as
from tandem.server.info.schema import DetokenizeBody, Load, Loads, Text, TokenizeBody, Tokens
from tandem.server.state import ServerState

_TOKENIZE = body_schema(TokenizeBody, oneOf=one_given("prompt", "messages"))


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    _add_token_routes(router, state)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": tandem.__version__})

    @router.get("/ping", summary="As /health")
    async def ping() -> Response:
        state.check_up()
        return json_response({"status": state.engine_status})

    @router.get("/get_load", openapi_extra=answers(list[Load]))
    async def get_load() -> Response:
        return json_response([_load(state)])

    @router.get("/v1/loads", openapi_extra=answers(Loads))
    async def loads() -> Response:
        return json_response(Loads(time.time(), tandem.__version__, 1, [_load(state)]))

    @router.get("/favicon.ico", include_in_schema=False)
    async def favicon() -> Response:
        return Response(status_code=204)

    @router.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        text = "embeddings are not served: a model that writes text makes none that mean anything"
        raise ApiError(400, text, code="not_available")

    return router


def _add_token_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", openapi_extra=_TOKENIZE | answers(Tokens))
    async def tokenize(http: Request) -> Response:
        body, ignored = await read_as(http, TokenizeBody)
        state.check_up()
        return name_ignored(json_response(await _tokens(state, body, ignored)), ignored)

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody) | answers(Text))
    async def detokenize(http: Request) -> Response:
        fields = await read_fields(http)
        state.prompts.check_length(fields.get("tokens"), "tokens")
        body, ignored = read_fields_as(fields, DetokenizeBody)
        with named({"prompt": "tokens"}):
            state.check_ids(body.tokens)
        text = await state.prompts.decode(body.tokens, bool(body.skip_special_tokens))
        return name_ignored(json_response(Text(text, text)), ignored)


async def _tokens(state: ServerState, body: TokenizeBody, ignored: list[str]) -> Tokens:
    most = state.engine.plan.context_length
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", "prompt")
    if isinstance(body.prompt, list):
        each = await state.encode_all(body.prompt, body.add_special_tokens is not False)
        return Tokens([len(ids) for ids in each], most, [*each])
    if body.prompt is not None:
        ids = await state.encode(body.prompt, body.add_special_tokens is not False)
    else:
        ids = await _chat_tokens(state, body, ignored)
    texts = await state.prompts.texts_of(ids) if body.return_token_strs else None
    return Tokens(len(ids), most, [*ids], texts)


async def _chat_tokens(state: ServerState, body: TokenizeBody, ignored: list[str]) -> list[int]:
    """The prompt that /v1/chat/completions would make."""
    chat = ChatRequest(
        messages=body.messages or [],
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    with named({"prompt": "messages"}):
        conversation = conversation_of(chat, state.sight(ignored))
        prepared = await state.chat.prepare(conversation, SamplingSettings(), counting=True)
        ignored += prepared.ignored
        return prepared.prompt_ids


def _load(state: ServerState) -> Load:
    """Load of the server. A request that was submitted and has not been reported yet counts as waiting."""
    plan, stats = state.engine.plan, state.client.stats
    running = stats.running
    waiting = max(stats.waiting, state.client.open_answers - running)
    used = (stats.pages_total - stats.pages_free) * plan.page_size
    room = plan.num_pages * plan.page_size
    return Load(0, running + waiting, running, waiting, used, used, room, used / room)
