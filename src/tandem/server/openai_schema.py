"""Bodies of the OpenAI routes. Fields and defaults: https://platform.openai.com/docs/api-reference and SGLang's extras.

What becomes of fields that are not here, `fields.py` says.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.engine.sampling.parameters import Dialect
from tandem.server.chat.answer_grammar import OpenAIGrammarFields
from tandem.server.limits import MAX_ID_CHARS, MAX_TOP_LOGPROBS
from tandem.server.sampling_bodies import Int64, with_parameters

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk, as vLLM


@with_parameters(Dialect.OPENAI)
class SamplingBody(OpenAIGrammarFields, kw_only=True):
    """Fields that both OpenAI routes share, beside those of the table. `engine/limits.py` checks ranges."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int64 | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    # SGLang's extras, and llama.cpp's
    dry_sequence_breakers: Annotated[list[str], Meta(max_length=64)] | None = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None  # vLLM's name for it
    return_token_ids: bool | None = None  # vLLM's


class CompletionRequest(SamplingBody, kw_only=True):
    """POST /v1/completions. `prompt`: a string, token ids, or a list of either."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None


# --- answers


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """`reasoning_tokens`: with those of its markers."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`completion_tokens_details`: of chats."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in a stream: of an answer's first chunk


class TextCompletion(msgspec.Struct, frozen=True):
    """Also one chunk of a stream, which has no usage except, when asked for, the last."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class Architecture(msgspec.Struct, frozen=True):
    """OpenRouter's: what the model reads and writes."""

    modality: str = "text->text"
    input_modalities: tuple[str, ...] = ("text",)
    output_modalities: tuple[str, ...] = ("text",)


SEEING = Architecture("text+image->text", ("text", "image"))


class Capabilities(msgspec.Struct, frozen=True):
    vision: bool = False


class ModelStatus(msgspec.Struct, frozen=True):
    """llama.cpp's: "loaded" or "sleeping"."""

    value: str = "loaded"


class ModelCard(msgspec.Struct, frozen=True):
    """`max_model_len` is vLLM's name of the context's length, `context_length` OpenRouter's."""

    id: str
    created: int
    max_model_len: int
    context_length: int
    object: str = "model"
    owned_by: str = "tandem"
    root: str = ""
    architecture: Architecture = Architecture()
    capabilities: Capabilities = Capabilities()
    status: ModelStatus = ModelStatus()


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"
