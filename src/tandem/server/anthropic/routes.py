"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from tandem.engine.protocol import GenerateRequest, SamplingParams
from tandem.errors import RequestError
from tandem.server.anthropic.request import conversation_of
from tandem.server.anthropic.schema import CountRequest, Message, MessagesRequest, TokenCountBody
from tandem.server.anthropic.writer import MessageWriter, failure
from tandem.server.body import answers, body_schema, read_fields
from tandem.server.chat.answer_grammar import NamedSchema, ResponseFormat
from tandem.server.chat.conversation import Conversation
from tandem.server.chat.model import PreparedChat
from tandem.server.errors import named
from tandem.server.fields import name_ignored, read_fields_as
from tandem.server.generation import Generation
from tandem.server.openai_sampling import new_id, sampling_of
from tandem.server.openai_schema import SamplingBody
from tandem.server.state import ServerState

T = TypeVar("T", bound=CountRequest)

_NAMES = {
    "prompt": "messages", "stop": "stop_sequences", "continue_final_message": "messages",
    "response_format": "output_config.format",
}  # fmt: skip
# What says how much to think is a wish here, as it is at Anthropic: clients send it to every model.
_WISHES = {
    "thinking_budget": ("thinking_budget", "thinking.budget_tokens"),
    "enable_thinking": ("thinking", "thinking"),
    "reasoning_effort": ("reasoning_effort", "output_config.effort"),
}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest) | answers(Message))
    async def messages(http: Request) -> Response:
        return await _messages(state, http)

    @router.post(
        "/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest) | answers(TokenCountBody)
    )
    async def count_tokens(http: Request) -> Response:
        body, ignored = await _read(http, CountRequest)
        state.check_up()
        with named(_NAMES):
            prepared = await _prepare(state, conversation_of(body), SamplingParams(), ignored)
        count = TokenCountBody(len(prepared.prompt_ids))
        return name_ignored(Response(msgspec.json.encode(count), media_type="application/json"), ignored)

    return router


async def _messages(state: ServerState, http: Request) -> Response:
    body, ignored = await _read(http, MessagesRequest)
    state.admit()
    message_id = new_id("msg")
    with named(_NAMES | {"grammar": "tools" if _format(body) is None else "output_config.format"}):
        prepared = await _prepare(state, conversation_of(body), _sampling(state, body), ignored)
        sampling = prepared.sampling
        room = max(1, state.answer_room(len(prepared.prompt_ids)))
        clipped = body.max_tokens > room
        if clipped:
            sampling = msgspec.structs.replace(sampling, max_tokens=room)
        request = GenerateRequest(id=message_id, prompt_ids=prepared.prompt_ids, sampling=sampling)
        generation = Generation(state, http, [request])
        shown = body.thinking is None or body.thinking.display != "omitted"
        writer = MessageWriter(
            message_id, state.model_name, prepared.new_parser(), clipped=clipped, show_thinking=shown
        )
        if body.stream:
            response: Response = await generation.events(writer.frames, writer.last, failure)
        else:
            await generation.run(writer.take)
            response = Response(msgspec.json.encode(writer.whole()), media_type="application/json")
    response.headers["request-id"] = message_id
    return name_ignored(response, ignored)


async def _read(http: Request, kind: type[T]) -> tuple[T, list[str]]:
    """The body, and the names of fields that nobody knows."""
    return read_fields_as(await read_fields(http), kind)


def _format(body: CountRequest) -> ResponseFormat | None:
    output = body.output_config
    if output is None or output.format is None:
        return None
    return ResponseFormat("json_schema", NamedSchema(output.format.schema))


def _sampling(state: ServerState, body: MessagesRequest) -> SamplingParams:
    same = SamplingBody(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        response_format=_format(body),
    )
    return sampling_of(same, state.sampling_defaults, max_tokens=body.max_tokens)


async def _prepare(
    state: ServerState, conversation: Conversation, sampling: SamplingParams, ignored: list[str]
) -> PreparedChat:
    """Wishes that the model's chat template has no switch for are left out, and added to `ignored`."""
    while True:
        try:
            return await state.chat.prepare(conversation, sampling)
        except RequestError as error:
            field, shown = _WISHES.get(error.param or "", ("", ""))
            if not field or getattr(conversation, field) is None:
                raise
            nothing: dict[str, Any] = {field: None}
            conversation = dataclasses.replace(conversation, **nothing)
            ignored.append(shown)
