"""Bodies of /v1/chat/completions. Fields: https://platform.openai.com/docs/api-reference/chat, and SGLang's, vLLM's
and DeepSeek's for reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.server.limits import MAX_MESSAGES, MAX_TOOLS
from tandem.server.openai_schema import ChatLogprobs, SamplingBody, TopLogprobs, Usage
from tandem.server.sampling_bodies import Int64

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class ContentPart(msgspec.Struct, frozen=True):
    """`thinking`: of an assistant. The fields from `file` on are attachments'. `image`, `url`: of the type "image"."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[ContentPart] | None = None
    file: Any = None
    image_url: Any = None
    image: Any = None
    url: Any = None
    detail: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments`: JSON text; some clients send the object."""

    name: ToolName
    arguments: str | dict[str, Any] = ""


class ToolCallBody(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """`reasoning_content` (or `reasoning`) of an assistant goes back to the model where its template has a place. A
    result without `tool_call_id` is the next one that is waited for.
    `prefix` of the last message: the answer goes on with it."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant", "tool"]})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None


class FunctionBody(msgspec.Struct, frozen=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True):
    function: FunctionBody
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_TOOLS)]


class ToolChoiceBody(msgspec.Struct, frozen=True):
    """One tool that must be called, or several that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class Thinking(msgspec.Struct, frozen=True):
    """As DeepSeek's and GLM's own servers take it."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Int64 | None = None


class ChatRequest(SamplingBody, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None


# --- answers


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: str = "function"


class AssistantMessage(msgspec.Struct, frozen=True):
    """`content` is null beside calls without text."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | None = None  # as SGLang
    token_ids: list[int] | UnsetType = UNSET  # as vLLM, as are the prompt's


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Piece of a tool call: each call's first has its id and name, all others a piece of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET  # in an answer's first
