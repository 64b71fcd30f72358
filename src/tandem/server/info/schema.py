"""Bodies of /tokenize, /detokenize and the load routes: vLLM's names, and SGLang's where they differ."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.server.chat.openai.schema import ChatMessage, ToolBody
from tandem.server.limits import MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS
from tandem.server.openai_schema import TokenId


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: exactly one of `prompt` and `messages`."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts and ids of a prompt; of several prompts, lists of each."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class Text(msgspec.Struct, frozen=True):
    """The same text, as vLLM and as SGLang call it."""

    prompt: str
    text: str


class Load(msgspec.Struct, frozen=True):
    """`num_reqs` run or wait."""

    dp_rank: int
    num_reqs: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int  # whose keys and values cannot be dropped
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class Loads(msgspec.Struct, frozen=True):
    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[Load]


class Modalities(msgspec.Struct, frozen=True):
    """Kinds of input that are read beside text."""

    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct, frozen=True):
    """llama.cpp's. `default_generation_settings`: `n_ctx` and what the model's own sampling defaults say."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: Modalities
    build_info: str
    is_sleeping: bool = False


class LmStudioModel(msgspec.Struct, frozen=True):
    id: str
    arch: str
    compatibility_type: str
    quantization: str
    max_context_length: int
    loaded_context_length: int
    object: str = "model"
    type: str = "llm"
    publisher: str = "tandem"
    state: str = "loaded"
    capabilities: tuple[str, ...] = ("tool_use",)


class LmStudioModels(msgspec.Struct, frozen=True):
    data: list[LmStudioModel]
    object: str = "list"
