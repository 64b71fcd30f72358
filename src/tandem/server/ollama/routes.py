"""/api/chat, /api/generate, /api/tags, /api/ps, /api/show, /api/version; what else Ollama has is refused."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from tandem.engine.limits import validate
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.sampling.parameters import Dialect, names_in
from tandem.planner.forecast.ledger import VRAM
from tandem.server.body import answers, body_schema, json_response
from tandem.server.chat.answer_parser import AnswerRules
from tandem.server.chat.model import PreparedChat
from tandem.server.errors import ApiError, named
from tandem.server.fields import name_ignored, read_as
from tandem.server.generation import SubmittedRequests
from tandem.server.info.model_files import weight_format
from tandem.server.ollama.keep_alive import expiry, keep_seconds
from tandem.server.ollama.request import chat_of, generation_of, refuse_raw_images, sampling_body
from tandem.server.ollama.schema import (
    ChatBody,
    CommonBody,
    Details,
    GenerateBody,
    Options,
    RunningModel,
    RunningModels,
    Said,
    Show,
    ShowBody,
    StreamLine,
    Tag,
    Tags,
)
from tandem.server.ollama.writer import LINES, OllamaWriter, now
from tandem.server.openai_sampling import new_id, sampling_of
from tandem.server.state import ServerState, cut_to_room

# The Ollama whose interface this is. Clients refuse a server with a lower version than they want: VS Code 0.6.4, Codex
# 0.13.4. Tandem's own is at /version.
INTERFACE = "0.14.3"
_NAMES = {ours: f"options.{theirs}" for ours, theirs in names_in(Dialect.OLLAMA).items()} | {
    "enable_thinking": "think", "reasoning_effort": "think", "response_format": "format",
    "continue_final_message": "messages",
}  # fmt: skip


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/api/chat", openapi_extra=body_schema(ChatBody) | answers(StreamLine, LINES))
    async def chat(http: Request) -> Response:
        body, ignored = await read_as(http, ChatBody, Options)
        return name_ignored(await _chat(state, http, body, ignored), _with_keep_alive(state, body, ignored))

    @router.post("/api/generate", openapi_extra=body_schema(GenerateBody) | answers(StreamLine, LINES))
    async def generate(http: Request) -> Response:
        body, ignored = await read_as(http, GenerateBody, Options)
        return name_ignored(await _generate(state, http, body, ignored), _with_keep_alive(state, body, ignored))

    @router.get("/api/version")
    async def version() -> Response:
        return json_response({"version": INTERFACE})

    @router.get("/api/tags", openapi_extra=answers(Tags))
    async def tags() -> Response:
        return json_response(Tags([_tag(state)]))

    @router.get("/api/ps", openapi_extra=answers(RunningModels))
    async def ps() -> Response:
        return json_response(RunningModels([] if state.client.sleep.asleep else [_running(state)]))

    @router.post("/api/show", openapi_extra=body_schema(ShowBody) | answers(Show))
    async def show(http: Request) -> Response:
        _, ignored = await read_as(http, ShowBody)
        return name_ignored(json_response(_show(state)), ignored)

    for path in ("/api/embed", "/api/embeddings"):

        @router.post(path, include_in_schema=False)
        async def embed() -> Response:
            text = "embeddings are not served: a model that writes text makes none that mean anything"
            raise ApiError(400, text, code="not_available")

    return router


async def _chat(state: ServerState, http: Request, body: ChatBody, ignored: list[str]) -> Response:
    """Without messages a client asks for the model to be loaded, or unloaded."""
    keep_seconds(body.keep_alive)  # before anything runs
    with state.admitted(), named(_names(body, "messages")):
        if body.is_empty:
            return await _loaded(state, body, message=Said("assistant", ""))
        prepared = await state.chat.prepare(chat_of(body, state.sight(ignored)), _sampling(state, body))
        ignored += prepared.ignored
        return await _answer(state, http, body, prepared, chat=True)


async def _generate(state: ServerState, http: Request, body: GenerateBody, ignored: list[str]) -> Response:
    keep_seconds(body.keep_alive)  # before anything runs
    with state.admitted(), named(_names(body, "prompt")):
        if body.is_empty:
            return await _loaded(state, body, response="")
        if body.raw:
            refuse_raw_images(body)
            ids = await state.encode(body.prompt, add_special_tokens=True)
            prepared = PreparedChat(ids, _sampling(state, body), AnswerRules())
        else:
            conversation = generation_of(body, state.sight(ignored))
            prepared = await state.chat.prepare(conversation, _sampling(state, body))
            ignored += prepared.ignored
        return await _answer(state, http, body, prepared, chat=False)


async def _answer(
    state: ServerState, http: Request, body: CommonBody, prepared: PreparedChat, *, chat: bool
) -> Response:
    sampling = cut_to_room(state, prepared.sampling, len(prepared.prompt_ids))
    request = GenerateRequest(
        id=new_id("ollama"), prompt_ids=prepared.prompt_ids, sampling=sampling, images=prepared.images
    )
    writer = OllamaWriter(state.model_name, prepared.new_parser(), chat=chat)
    answer = await SubmittedRequests(state, http, [request]).answer(writer, body.stream is not False, LINES)
    _keep(state, body)  # a request that is refused says nothing of it
    return answer


def _names(body: CommonBody, prompt: str) -> dict[str, str]:
    return _NAMES | {"prompt": prompt, "grammar": "format" if body.format else "tools"}


def _sampling(state: ServerState, body: CommonBody) -> SamplingSettings:
    num_predict = body.options.num_predict if body.options else None
    limit = None if num_predict is not None and num_predict < 0 else num_predict
    return sampling_of(sampling_body(body), state.sampling_defaults, max_tokens=limit)


def _keep(state: ServerState, body: CommonBody) -> None:
    """Where the model stays for good, only an empty prompt unloads it."""
    seconds, sleep = keep_seconds(body.keep_alive), state.client.sleep
    if seconds is not None and sleep.by_itself:
        sleep.keep(seconds)


async def _loaded(state: ServerState, body: CommonBody, **fields: Any) -> Response:
    """Raises RequestError; EngineError where it cannot be loaded."""
    validate(_sampling(state, body), state.engine.vocab_size)
    unloads = keep_seconds(body.keep_alive) == 0
    if unloads:
        state.client.sleep.soon()
    else:
        _keep(state, body)
        await state.client.wake()
    reason = "unload" if unloads else "load"
    return json_response(StreamLine(model=state.model_name, created_at=now(), done=True, done_reason=reason, **fields))


def _with_keep_alive(state: ServerState, body: CommonBody, ignored: list[str]) -> list[str]:
    """It is ignored where the model stays for good, unless it asks for that, or to be unloaded now."""
    seconds = keep_seconds(body.keep_alive)
    honoured = seconds in (None, math.inf) or state.client.sleep.by_itself or (seconds == 0 and body.is_empty)
    return ignored if honoured else [*ignored, "keep_alive"]


def _tag(state: ServerState) -> Tag:
    length = state.engine.plan.context_length
    began = datetime.fromtimestamp(state.started_at, UTC).isoformat()
    return Tag(state.model_name, state.model_name, began, state.files.nbytes, "", _details(state), length)


def _running(state: ServerState) -> RunningModel:
    name, plan = state.model_name, state.engine.plan
    vram = sum(ledger.total_bytes for ledger in plan.ledgers if ledger.place == VRAM)
    expires = expiry(state.client.sleep.seconds_left)
    length = plan.context_length
    return RunningModel(name, name, state.files.nbytes, "", _details(state), expires, vram, length)


def _details(state: ServerState) -> Details:
    kind = state.engine.model_type
    return Details(state.files.format, kind, [kind], quantization_level=weight_format(state.engine.plan))


def _show(state: ServerState) -> Show:
    engine, tag = state.engine, _tag(state)
    info = {
        "general.architecture": engine.model_type,
        "general.basename": state.model_name,
        f"{engine.model_type}.context_length": engine.plan.context_length,
        f"{engine.model_type}.vocab_size": engine.vocab_size,
    }
    optional = {"vision": state.chat.sees, "thinking": state.chat.reasons}
    capabilities = ["completion", "tools", *(name for name, has in optional.items() if has)]
    return Show("", "", "", tag.details, info, capabilities, tag.modified_at)
