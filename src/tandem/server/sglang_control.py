"""SGLang's routes about the server itself: health, information, cache, abort."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

import tandem
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.errors import RequestError
from tandem.server.body import body_schema, decode, json_response, read_body, with_field
from tandem.server.errors import ApiError, unavailable
from tandem.server.generation import SubmittedRequests
from tandem.server.guard.traces import shown_endpoint
from tandem.server.limits import HEALTH_SECONDS
from tandem.server.openai_sampling import new_id
from tandem.server.sglang_schema import AbortBody, MemoryBody
from tandem.server.sleep import until_any
from tandem.server.state import ServerState

_SECRET_FIELDS = {"api_key", "explicit", "former", "way_chosen"}
_ABORT_BODY = body_schema(AbortBody, anyOf=[with_field("rid", minLength=1), with_field("abort_all", const=True)])
_MEMORY_BODY = body_schema(MemoryBody, needed=False)
_RECORDER_FIELDS = ("recording", "mode", "passes", "tokens", "file")


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.get("/health", summary="200 when requests are taken, else 503")
    async def health() -> Response:
        state.check_up()
        return json_response({"status": state.engine_status})

    @router.get("/health_generate", summary="Generates one token, unless the engine is asleep")
    async def health_generate(http: Request) -> Response:
        await _generate_one(state, http)
        return json_response({"status": state.engine_status})

    @router.get("/get_model_info")
    @router.get("/model_info", operation_id="model_info")
    async def get_model_info() -> Response:
        return json_response(_model_info(state))

    @router.get("/get_server_info")
    @router.get("/server_info", operation_id="server_info")
    async def get_server_info() -> Response:
        return json_response(_server_info(state))

    @router.post("/flush_cache", summary="Drop the prefix cache", response_class=PlainTextResponse)
    async def flush_cache() -> Response:
        await state.client.flush_cache()
        return Response("The prefix cache is empty.\n", media_type="text/plain")

    def add_recorder_route(action: Literal["start", "stop", "dump"], summary: str) -> None:
        path = f"/{action}_expert_distribution_record"

        @router.post(path, summary=summary, operation_id=f"{action}_record")
        async def record() -> Response:
            state.check_up()
            done = await state.client.record_experts(action)
            return json_response({name: getattr(done, name) for name in _RECORDER_FIELDS})

    add_recorder_route("start", "Record which experts are used, from zero")
    add_recorder_route("stop", "Stop recording")
    add_recorder_route("dump", "Write what was recorded to a file, and go on from zero")

    @router.post("/abort_request", openapi_extra=_ABORT_BODY)
    async def abort_request(http: Request) -> Response:
        body = decode(await read_body(http), AbortBody)
        return json_response({"aborted": _abort(state, body)})

    _add_memory_routes(router, state)
    return router


def _add_memory_routes(router: APIRouter, state: ServerState) -> None:
    @router.post(
        "/release_memory_occupation", openapi_extra=_MEMORY_BODY, summary="End the engine once nothing runs"
    )
    async def release_memory_occupation(http: Request) -> Response:
        await _check_tags(http)
        state.check_up()
        await _release(state)
        return json_response({"status": "sleeping"})

    @router.post(
        "/resume_memory_occupation", openapi_extra=_MEMORY_BODY, summary="Load the engine, and wait for it"
    )
    async def resume_memory_occupation(http: Request) -> Response:
        await _check_tags(http)
        state.check_up()
        await state.client.wake()
        return json_response({"status": "ok"})


async def _release(state: ServerState) -> None:
    """Raises ApiError 400, 409, 503: it will not be released."""
    if state.client.holds_recording:
        text = "the engine holds a recording of its experts, which would be lost; first call "
        text += "/stop_expert_distribution_record, where it still records, and /dump_expert_distribution_record"
        raise ApiError(400, text, code="recording")
    sleep = state.client.sleep
    sleep.soon()
    await until_any(sleep.released, sleep.stays, state.drains)
    if sleep.released.is_set():
        return
    state.check_up()
    if sleep.stays.is_set():
        text = "the engine stays: a later request told it to; release it again if that is what you want"
        raise ApiError(409, text, code="resumed")


def _abort(state: ServerState, body: AbortBody) -> bool:
    """False when no such request runs; that is no error, it may have finished just now."""
    if not body.abort_all and not body.rid:
        raise RequestError("send rid, or abort_all: true", "rid")
    return state.client.abort("" if body.abort_all else body.rid or "")


async def _check_tags(http: Request) -> None:
    """Raises ApiError 400."""
    body = await read_body(http)
    tags = decode(body, MemoryBody).tags if body.strip() else None
    if tags and "weights" not in tags:  # none is all, as in SGLang
        text = "memory of all kinds is released and resumed together, with the engine; leave tags out"
        raise ApiError(400, text, param="tags", code="not_available")


async def _generate_one(state: ServerState, http: Request) -> None:
    """A busy engine need not come to this token in time: that it made others is as good. One that is asleep stays so.
    Raises ApiError 503, EngineError."""
    state.check_up()
    if not state.client.ready:
        return
    before = state.client.stats.generated_tokens
    prompt = await state.encode("Hello", add_special_tokens=True)
    sampling = SamplingSettings(max_tokens=1, temperature=0.0, ignore_eos=True)
    generation = SubmittedRequests(
        state, http, [GenerateRequest(id=new_id("health"), prompt_ids=prompt, sampling=sampling)], probe=True
    )
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            await generation.collect()
    except TimeoutError as error:
        if state.client.stats.generated_tokens > before:
            return
        raise unavailable(f"no token within {HEALTH_SECONDS:g} s") from error


def _model_info(state: ServerState) -> dict[str, Any]:
    engine = state.engine
    return {
        "model_path": engine.model_path,
        "tokenizer_path": engine.model_path,
        "served_model_name": state.model_name,
        "model_type": engine.model_type,
        "is_generation": True,
        "has_image_understanding": state.chat.sees,
        "context_length": engine.plan.context_length,
        "vocab_size": engine.vocab_size,
    }


def _server_info(state: ServerState) -> dict[str, Any]:
    """Flags as SGLang has them at the top level, then what was resolved and what is going on."""
    flags = {
        field.name: getattr(state.config, field.name)
        for field in dataclasses.fields(state.config)
        if field.name not in _SECRET_FIELDS
    }
    if state.config.otlp_traces_endpoint is not None:
        flags["otlp_traces_endpoint"] = shown_endpoint(state.config.otlp_traces_endpoint)
    plan = state.engine.plan
    stages = 0 if plan.gpu is None else len(plan.gpu.stages)
    return flags | {
        "tensor_parallel_size": plan.ranks,
        "pipeline_parallel_size": max(1, stages),
        "version": tandem.__version__,
        "model_path": state.engine.model_path,
        "served_model_name": state.model_name,
        "plan": plan,
        "stats": state.client.stats,
        "open_answers": state.client.open_answers,
        "engine_restarts": state.restarts(),
        "engine_up": state.client.ready,
        "engine_sleeping": state.client.sleep.asleep,
        "engine_wakes": state.client.sleep.wakes,
    }
