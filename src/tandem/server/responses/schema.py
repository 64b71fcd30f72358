"""Bodies of /v1/responses. Fields: https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.engine.sampling.parameters import Dialect
from tandem.server.chat.openai.schema import ToolName
from tandem.server.limits import MAX_MESSAGES, MAX_TOOLS
from tandem.server.openai_schema import RequestId
from tandem.server.sampling_bodies import Int64, with_parameters


class Part(msgspec.Struct, frozen=True):
    """A piece of a message, of a tool's output or of reasoning. Which types are served, `request.py` knows. The fields
    from `filename` on are attachments'."""

    type: str
    text: str | None = None
    refusal: str | None = None
    filename: str | None = None
    file_data: str | None = None
    file_url: Any = None
    file_id: Any = None
    image_url: Any = None
    input_audio: Any = None
    detail: Any = None
    annotations: Any = None
    logprobs: Any = None


class Item(msgspec.Struct, frozen=True):
    """An input item of any type; without one it is a message."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: ToolName | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    phase: str | None = None


class CustomFormat(msgspec.Struct, frozen=True):
    """Form of a custom tool's input: any text, or what a grammar says."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ToolBody(msgspec.Struct, frozen=True):
    """`tools`: of a namespace. `format`: of a custom tool. Which types are served, `tools.py` knows."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None


class AllowedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that may be called. Those that OpenAI runs itself have a type alone."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ToolChoiceBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool that must be called, or `tools` that may be, as `mode` says."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS)] = []


class Reasoning(msgspec.Struct, frozen=True):
    """A `summary` is not made: reasoning is told as it is, and the answer's header says so."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextBody(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


@with_parameters(Dialect.RESPONSES)
class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses. The fields from `include` on change nothing here."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: RequestId | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Int64 | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextBody | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    stream_options: StreamOptions | None = None


# --- answers


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Incomplete(msgspec.Struct, frozen=True):
    reason: str


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """`output` has items: messages, reasoning, function calls."""

    id: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextBody
    tool_choice: Any
    tools: list[ToolBody]
    top_p: float
    metadata: dict[str, str]
    usage: Usage | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    user: str | None = None
    truncation: str = "disabled"
    background: bool = False
    object: str = "response"


class InputTokens(msgspec.Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"


class Deleted(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True
