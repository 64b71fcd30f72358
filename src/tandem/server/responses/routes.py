"""POST /v1/responses; GET and DELETE of one that was stored."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse

from tandem.engine.protocol import GenerateRequest, SamplingParams
from tandem.server.body import answers, body_schema, read_fields
from tandem.server.chat.answer_grammar import NamedSchema, ResponseFormat
from tandem.server.chat.conversation import Message
from tandem.server.errors import named
from tandem.server.fields import name_ignored, read_fields_as
from tandem.server.generation import Generation
from tandem.server.openai_sampling import new_id, sampling_of
from tandem.server.openai_schema import SamplingBody
from tandem.server.responses.items import Items
from tandem.server.responses.request import conversation_of, input_messages
from tandem.server.responses.schema import Deleted, Response, ResponsesRequest, TextBody
from tandem.server.responses.store import ResponseStore, Stored
from tandem.server.responses.writer import ResponseWriter, begun
from tandem.server.state import ServerState

_NAMES = {
    "prompt": "input", "messages": "input", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort", "enable_thinking": "reasoning.effort",
    "response_format": "text.format",
}  # fmt: skip


def routes(state: ServerState) -> APIRouter:
    router, store = APIRouter(), ResponseStore()

    @router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest) | answers(Response))
    async def responses(http: Request) -> HttpResponse:
        return await _respond(state, store, http)

    @router.get("/v1/responses/{response_id}", openapi_extra=answers(Response))
    async def response(response_id: str) -> HttpResponse:
        return HttpResponse(store.get(response_id, "response_id").body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", openapi_extra=answers(Deleted))
    async def delete(response_id: str) -> HttpResponse:
        store.drop(response_id, "response_id")
        return HttpResponse(msgspec.json.encode(Deleted(response_id)), media_type="application/json")

    return router


async def _respond(state: ServerState, store: ResponseStore, http: Request) -> HttpResponse:
    body, ignored = read_fields_as(await read_fields(http), ResponsesRequest)
    state.admit()
    response_id = new_id("resp")
    earlier = _earlier(store, body)

    def keep(response: Response, items: Items) -> None:
        if body.store is not False:
            messages = (*earlier, *input_messages(body), items.said())
            store.put(response_id, Stored(messages, msgspec.json.encode(response)))

    formatted = body.text is not None and body.text.format is not None and body.text.format.type != "text"
    with named(_NAMES | {"grammar": "text.format" if formatted else "tools"}):
        prepared = await state.chat.prepare(conversation_of(body, earlier), _sampling(state, body))
        request = GenerateRequest(
            id=response_id, prompt_ids=prepared.prompt_ids, sampling=prepared.sampling
        )
        generation = Generation(state, http, [request])
        start = begun(body, response_id, state.model_name, request.sampling)
        writer = ResponseWriter(start, prepared.new_parser(), keep)
        if body.stream:
            answer: HttpResponse = await generation.events(writer.frames, writer.last, writer.failed)
        else:
            await generation.run(writer.take)
            answer = HttpResponse(msgspec.json.encode(writer.whole()), media_type="application/json")
    return name_ignored(answer, ignored)


def _earlier(store: ResponseStore, body: ResponsesRequest) -> tuple[Message, ...]:
    """Raises ApiError 400."""
    if body.previous_response_id is None:
        return ()
    return store.get(body.previous_response_id, "previous_response_id").messages


def _format(text: TextBody | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    given = text.format
    return ResponseFormat(given.type, NamedSchema(given.schema, given.name))


def _sampling(state: ServerState, body: ResponsesRequest) -> SamplingParams:
    same = SamplingBody(
        temperature=body.temperature, top_p=body.top_p, response_format=_format(body.text)
    )
    return sampling_of(same, state.sampling_defaults, max_tokens=body.max_output_tokens)
