"""Facts about the served model for clients of other servers: llama.cpp's /props, LM Studio's /api/v0/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

import tandem
from tandem.server.body import answers, json_response
from tandem.server.info.model_files import weight_format
from tandem.server.info.schema import LmStudioModel, LmStudioModels, Modalities, Props
from tandem.server.state import ServerState


def routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.get("/props", openapi_extra=answers(Props))
    async def props() -> Response:
        return json_response(_props(state))

    @router.get("/api/v0/models", openapi_extra=answers(LmStudioModels))
    async def models() -> Response:
        return json_response(LmStudioModels([_model(state)]))

    @router.get("/api/v0/models/{model_id:path}", openapi_extra=answers(LmStudioModel))
    async def model(model_id: str) -> Response:
        state.check_model(model_id)
        return json_response(_model(state))

    return router


def _props(state: ServerState) -> Props:
    engine, template = state.engine, state.tokenizer.chat_template
    settings: dict[str, Any] = {"n_ctx": engine.plan.context_length, "params": dict(state.sampling_defaults)}
    return Props(
        default_generation_settings=settings,
        total_slots=engine.plan.max_running_requests,
        model_alias=state.model_name,
        model_path=engine.model_path,
        chat_template="" if template is None else template.source,
        modalities=Modalities(vision=state.chat.sees),
        build_info=f"tandem {tandem.__version__}",
        is_sleeping=state.client.sleep.asleep,
    )


def _model(state: ServerState) -> LmStudioModel:
    engine = state.engine
    return LmStudioModel(
        id=state.model_name,
        arch=engine.model_type,
        compatibility_type=state.files.format,
        quantization=weight_format(engine.plan),
        max_context_length=engine.plan.context_length,
        loaded_context_length=engine.plan.context_length,
        type="vlm" if state.chat.sees else "llm",
        state="not-loaded" if state.client.sleep.asleep else "loaded",
    )
