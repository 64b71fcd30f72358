"""Bodies of the SGLang routes. Names and defaults: https://docs.sglang.ai/basic_usage/native_api.html"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.engine.sampling.parameters import Dialect
from tandem.server.chat.answer_grammar import GrammarFields
from tandem.server.limits import MAX_PROMPTS
from tandem.server.logprobs import SglangLogprob
from tandem.server.openai_schema import RequestId, TokenId, TopLogprobs
from tandem.server.sampling_bodies import Int64, with_parameters


@with_parameters(Dialect.SGLANG, defaults=True)
class SglangSampling(GrammarFields, kw_only=True):
    """`sampling_params`, beside those of the table. `engine/limits.py` checks ranges."""

    max_new_tokens: Int64 | UnsetType | None = UNSET  # left out: 128; null: up to the context length
    dry_sequence_breakers: Annotated[list[str], Meta(max_length=64)] | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool = False


class SglangRequest(msgspec.Struct, kw_only=True):
    """POST /generate. Exactly one of `text` and `input_ids`; a list of prompts is a batch. `image_data`: images in
    base64, one for each placeholder in the text; of a batch a list for each prompt."""

    text: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    image_data: str | list[str | list[str] | None] | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    rid: RequestId | list[RequestId] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int64 | list[Int64] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    return_text_in_logprobs: bool = False


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request"""

    rid: str | None = None
    abort_all: bool | None = None


class MemoryBody(msgspec.Struct, kw_only=True):
    """POST /release_memory_occupation, /resume_memory_occupation. `tags`: kinds of memory, all of them here."""

    tags: list[str] | None = None


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """{"type": "stop", "matched": …} | {"type": "length", "length": …} | {"type": "abort", "message": …}"""

    type: str
    matched: str | int | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | None = None  # seconds, with the last chunk
    input_token_logprobs: list[SglangLogprob] | None = None
    output_token_logprobs: list[SglangLogprob] | None = None
    input_top_logprobs: list[list[SglangLogprob] | None] | None = None
    output_top_logprobs: list[list[SglangLogprob] | None] | None = None


class SglangAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`text` and `output_ids` are cumulative in a stream, unless the server was told otherwise. `index` is there in a
    stream of several answers."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None
