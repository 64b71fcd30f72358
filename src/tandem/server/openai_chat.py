"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import Request, Response

from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.sampling.parameters import Dialect, names_in
from tandem.errors import RequestError
from tandem.server.chat.answer_grammar import grammar_field
from tandem.server.chat.openai.request import conversation_of
from tandem.server.chat.openai.schema import ChatRequest
from tandem.server.chat.openai.writer import ChatWriter
from tandem.server.chat.optional_fields import Wishes, prepare_wishes
from tandem.server.errors import named
from tandem.server.fields import name_ignored, read_as
from tandem.server.generation import SubmittedRequests
from tandem.server.openai_sampling import check_stream_options, dry_breakers, request_id, sampling_of
from tandem.server.sampling_bodies import sent_parameters
from tandem.server.state import ServerState, cut_to_room

NO_LIMIT = -1  # of max_tokens, as in LM Studio and llama.cpp


# Clients for reasoning models send it to every model, and other servers pass it to templates that may not ask for it.
_WISHES: Wishes = {"reasoning_effort": ("reasoning_effort", "reasoning_effort")}


async def chat(state: ServerState, http: Request) -> Response:
    body, ignored = await read_as(http, ChatRequest)
    check_stream_options(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    with state.admitted(), named(_names(body)):
        conversation = conversation_of(body, state.sight(ignored))
        prepared = await prepare_wishes(state.chat, conversation, _sampling(state, body), _WISHES, ignored)
        ids = prepared.prompt_ids
        sampling = cut_to_room(state, prepared.sampling, len(ids))
        name = request_id(body, "chatcmpl")
        request = GenerateRequest(id=name, prompt_ids=ids, sampling=sampling, images=prepared.images)
        writer = ChatWriter(state, body, prepared, request.id)
        response = await SubmittedRequests(state, http, [request]).answer(writer, body.stream)
    return name_ignored(response, ignored)


def _names(body: ChatRequest) -> dict[str, str]:
    longest = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    here = {"prompt": "messages", "max_tokens": longest, "grammar": grammar_field(body) or "tools"}
    return names_in(Dialect.OPENAI) | here


def _sampling(state: ServerState, body: ChatRequest) -> SamplingSettings:
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    limit = None if limit == NO_LIMIT else limit
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sent = sent_parameters(body, Dialect.OPENAI)
    breakers = dry_breakers(body.dry_sequence_breakers, sent, state.tokenizer)
    return sampling_of(body, state.sampling_defaults, max_tokens=limit, logprobs=logprobs, dry_breakers=breakers)
