"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter, Request, Response

from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.sampling.parameters import Dialect, names_in
from tandem.server.anthropic.request import conversation_of, left_out
from tandem.server.anthropic.schema import CountRequest, MessageResponse, MessagesRequest, TokenCountBody
from tandem.server.anthropic.writer import MessageWriter
from tandem.server.body import answers, body_schema, json_response
from tandem.server.chat.answer_grammar import NamedSchema, ResponseFormat
from tandem.server.chat.optional_fields import Wishes, prepare_wishes
from tandem.server.errors import named
from tandem.server.fields import name_ignored, read_as
from tandem.server.generation import SubmittedRequests
from tandem.server.openai_sampling import new_id, sampling_of
from tandem.server.openai_schema import SamplingBody
from tandem.server.sampling_bodies import sent_parameters
from tandem.server.state import ServerState, cut_to_room

T = TypeVar("T", bound=CountRequest)

_NAMES = {
    **names_in(Dialect.ANTHROPIC),
    "prompt": "messages", "continue_final_message": "messages", "response_format": "output_config.format",
}  # fmt: skip
# What says how much to think is a wish here, as it is at Anthropic: clients send it to every model.
_WISHES: Wishes = {
    "thinking_budget": ("thinking_budget", "thinking.budget_tokens"),
    "enable_thinking": ("thinking", "thinking"),
    "reasoning_effort": ("reasoning_effort", "output_config.effort"),
}


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest) | answers(MessageResponse))
    async def messages(http: Request) -> Response:
        return await _messages(state, http)

    @router.post(
        "/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest) | answers(TokenCountBody)
    )
    async def count_tokens(http: Request) -> Response:
        body, ignored = await _read(http, CountRequest)
        state.check_up()
        with named(_NAMES):
            prepared = await prepare_wishes(
                state.chat, conversation_of(body, state.sight(ignored)), SamplingSettings(), _WISHES, ignored,
                counting=True,
            )  # fmt: skip
        count = TokenCountBody(len(prepared.prompt_ids))
        return name_ignored(json_response(count), ignored)

    return router


async def _messages(state: ServerState, http: Request) -> Response:
    body, ignored = await _read(http, MessagesRequest)
    message_id = new_id("msg")
    names = _NAMES | {"grammar": "tools" if _format(body) is None else "output_config.format"}
    with state.admitted(), named(names):
        prepared = await prepare_wishes(
            state.chat, conversation_of(body, state.sight(ignored)), _sampling(state, body), _WISHES, ignored
        )
        sampling = cut_to_room(state, prepared.sampling, len(prepared.prompt_ids))
        clipped = sampling is not prepared.sampling
        request = GenerateRequest(
            id=message_id, prompt_ids=prepared.prompt_ids, sampling=sampling, images=prepared.images
        )
        shown = body.thinking is None or body.thinking.display != "omitted"
        writer = MessageWriter(
            message_id, state.model_name, prepared.new_parser(), len(prepared.prompt_ids), clipped=clipped,
            show_thinking=shown,
        )  # fmt: skip
        response = await SubmittedRequests(state, http, [request]).answer(writer, body.stream)
    response.headers["request-id"] = message_id
    return name_ignored(response, ignored)


async def _read(http: Request, kind: type[T]) -> tuple[T, list[str]]:
    """The body, and the names of what the model is not told of."""
    body, ignored = await read_as(http, kind)
    return body, [*ignored, *left_out(body)]


def _format(body: CountRequest) -> ResponseFormat | None:
    output = body.output_config
    if output is None or output.format is None:
        return None
    return ResponseFormat("json_schema", NamedSchema(output.format.schema))


def _sampling(state: ServerState, body: MessagesRequest) -> SamplingSettings:
    same = sent_parameters(body, Dialect.ANTHROPIC)
    sampling = SamplingBody(stop=body.stop_sequences, response_format=_format(body), **same)
    return sampling_of(sampling, state.sampling_defaults, max_tokens=body.max_tokens)
