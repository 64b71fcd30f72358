"""POST /v1/responses; GET and DELETE of one that was stored."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse

from tandem.engine.limits import TOO_LONG
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.sampling.parameters import Dialect, names_in
from tandem.errors import RequestError
from tandem.server.body import answers, body_schema, json_response
from tandem.server.chat.answer_grammar import NamedSchema, ResponseFormat
from tandem.server.chat.conversation import Message
from tandem.server.chat.optional_fields import Wishes, prepare_wishes
from tandem.server.errors import ApiError, as_api_error, named
from tandem.server.fields import name_ignored, read_as
from tandem.server.generation import EVENTS, SubmittedRequests
from tandem.server.openai_sampling import new_id, sampling_of
from tandem.server.openai_schema import SamplingBody
from tandem.server.responses.items import Items
from tandem.server.responses.request import conversation_of, input_messages
from tandem.server.responses.schema import (
    Deleted,
    InputTokens,
    Item,
    Reasoning,
    Response,
    ResponsesRequest,
    TextBody,
)
from tandem.server.responses.store import ResponseStore, StoredResponse
from tandem.server.responses.tools import left_out, offer_of
from tandem.server.responses.writer import ResponseWriter, begun, refused
from tandem.server.sampling_bodies import sent_parameters
from tandem.server.state import ServerState, cut_to_room

_NAMES = {
    **names_in(Dialect.RESPONSES), "prompt": "input", "messages": "input", "reasoning_effort": "reasoning.effort",
    "enable_thinking": "reasoning.effort", "response_format": "text.format",
}  # fmt: skip
# As for Anthropic's clients: agents send an effort to every model.
_WISHES: Wishes = {
    "reasoning_effort": ("reasoning_effort", "reasoning.effort"),
    "enable_thinking": ("reasoning_effort", "reasoning.effort"),
}


def routes(state: ServerState) -> APIRouter:
    router, store = APIRouter(), ResponseStore()

    @router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest) | answers(Response))
    async def responses(http: Request) -> HttpResponse:
        return await _respond(state, store, http)

    @router.post(
        "/v1/responses/input_tokens", openapi_extra=body_schema(ResponsesRequest) | answers(InputTokens)
    )
    async def input_tokens(http: Request) -> HttpResponse:
        return await _count(state, store, http)

    @router.get("/v1/responses/{response_id}", openapi_extra=answers(Response))
    async def response(response_id: str) -> HttpResponse:
        return HttpResponse(store.get(response_id, "response_id").body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", openapi_extra=answers(Deleted))
    async def delete(response_id: str) -> HttpResponse:
        store.drop(response_id, "response_id")
        return json_response(Deleted(response_id))

    return router


async def _respond(state: ServerState, store: ResponseStore, http: Request) -> HttpResponse:
    body, ignored = await read_as(http, ResponsesRequest)
    with state.admitted():
        answer = await _answer(state, store, http, body, ignored)
    return name_ignored(answer, [*ignored, *_unserved(body.reasoning), *left_out(body)])


async def _answer(
    state: ServerState, store: ResponseStore, http: Request, body: ResponsesRequest, ignored: list[str]
) -> HttpResponse:
    response_id = new_id("resp")
    earlier = _earlier(store, body)
    body = _resolved(store, body)

    def keep(response: Response, items: Items) -> None:
        if body.store is not False:
            messages = (*earlier, *input_messages(body, state.sight([])), items.message())
            items_json = {item["id"]: msgspec.json.encode(item) for item in items.done}
            store.put(response_id, StoredResponse(messages, msgspec.json.encode(response), items_json))

    offer = offer_of(body)
    with named(_NAMES):
        sampling = _sampling(state, body)
    start = begun(body, response_id, state.model_name, sampling)
    formatted = body.text is not None and body.text.format is not None and body.text.format.type != "text"
    try:
        with named(_NAMES | {"grammar": "text.format" if formatted else "tools"}):
            tools = [each.tool for each in offer.values()]
            conversation = conversation_of(body, earlier, tools, state.sight(ignored))
            prepared = await prepare_wishes(state.chat, conversation, sampling, _WISHES, ignored)
            ids = prepared.prompt_ids
            limited = cut_to_room(state, prepared.sampling, len(ids))
            request = GenerateRequest(id=response_id, prompt_ids=ids, sampling=limited, images=prepared.images)
            writer = ResponseWriter(start, prepared.new_parser(), offer, keep)
            return await SubmittedRequests(state, http, [request]).answer(writer, body.stream)
    except RequestError as error:
        if not body.stream or error.code != TOO_LONG:
            raise
        # Agents shorten a conversation whose stream fails with this code. They give up when it is not begun.
        return HttpResponse(refused(start, as_api_error(error)), media_type=EVENTS)


async def _count(state: ServerState, store: ResponseStore, http: Request) -> HttpResponse:
    """Tokens of the prompt that the same body would make."""
    body, ignored = await read_as(http, ResponsesRequest)
    state.check_up()
    earlier, body = _earlier(store, body), _resolved(store, body)
    with named(_NAMES):
        tools = [each.tool for each in offer_of(body).values()]
        conversation = conversation_of(body, earlier, tools, state.sight(ignored))
        prepared = await prepare_wishes(
            state.chat, conversation, SamplingSettings(), _WISHES, ignored, counting=True
        )
    count = InputTokens(len(prepared.prompt_ids))
    return name_ignored(json_response(count), [*ignored, *left_out(body)])


def _unserved(reasoning: Reasoning | None) -> list[str]:
    """Names of what is asked for beside reasoning and not made."""
    names = ("summary", "generate_summary")
    return [f"reasoning.{name}" for name in names if reasoning and getattr(reasoning, name) is not None]


def _earlier(store: ResponseStore, body: ResponsesRequest) -> tuple[Message, ...]:
    """Raises ApiError 400."""
    if body.previous_response_id is None:
        return ()
    return store.get(body.previous_response_id, "previous_response_id").messages


def _resolved(store: ResponseStore, body: ResponsesRequest) -> ResponsesRequest:
    """With the items that its input refers to by their ids, each once: the input may become as large as the store, and
    no larger. Raises ApiError 400."""
    if isinstance(body.input, str):
        return body
    items, ids = list[Item](), set[str | None]()
    for i, item in enumerate(body.input):
        if item.type == "item_reference":
            if item.id in ids:
                raise ApiError(400, f"input[{i}].id: {(item.id or '')[:100]!r} is named twice", param=f"input[{i}].id")
            ids.add(item.id)
            item = msgspec.convert(store.item(item.id, f"input[{i}].id"), Item)
        items.append(item)
    return msgspec.structs.replace(body, input=items)


def _format(text: TextBody | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    form = text.format
    return ResponseFormat(form.type, NamedSchema(form.schema, form.name))


def _sampling(state: ServerState, body: ResponsesRequest) -> SamplingSettings:
    same = sent_parameters(body, Dialect.RESPONSES)
    sampling = SamplingBody(response_format=_format(body.text), **same)
    return sampling_of(sampling, state.sampling_defaults, max_tokens=body.max_output_tokens)
