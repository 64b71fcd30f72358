"""Bodies of Anthropic's routes. Fields: https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.engine.sampling.parameters import Dialect
from tandem.server.chat.openai.schema import ToolName
from tandem.server.limits import MAX_MESSAGES, MAX_TOOLS
from tandem.server.sampling_bodies import Int64, with_parameters


class ContentBlock(msgspec.Struct, frozen=True):
    """A content block of any type. Which fields belong to which type, `request.py` knows.

    `source`, `title` and `context` are a document's or a search result's, `tool_name` a reference's. `cache_control`
    changes nothing: prefixes are always cached. `citations` are those of answers.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    caller: Any = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    source: Any = None
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None
    cache_control: Any = None
    citations: Any = None


class MessageBody(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolBody(msgspec.Struct, frozen=True):
    """`type`: only tools of the client's own ("custom") are served."""

    name: ToolName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class ToolChoiceBody(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


@with_parameters(Dialect.ANTHROPIC)
class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages. `metadata`, `service_tier` and `cache_control` change nothing here."""

    max_tokens: Int64
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: Any = None


# --- answers


class TokenCountBody(msgspec.Struct, frozen=True):
    input_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`input_tokens` are those that no cache held."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: OutputDetails
    cache_creation_input_tokens: int = 0


class MessageResponse(msgspec.Struct, frozen=True):
    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    type: str = "message"
    role: str = "assistant"


class ErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True):
    error: ErrorDetail
    request_id: str
    type: str = "error"
