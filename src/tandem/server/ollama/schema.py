"""Bodies of Ollama's routes. Fields: https://docs.ollama.com/api"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.engine.sampling.parameters import Dialect
from tandem.server.chat.openai.schema import ToolBody, ToolName
from tandem.server.limits import MAX_MESSAGES, MAX_TOOLS
from tandem.server.sampling_bodies import Int64, with_parameters

Format = str | dict[str, Any]  # "json", or a schema
Think = bool | str


class CalledFunction(msgspec.Struct, frozen=True):
    name: ToolName
    arguments: dict[str, Any] = {}
    index: int | None = None


class CalledTool(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class MessageBody(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


@with_parameters(Dialect.OLLAMA)
class Options(msgspec.Struct, frozen=True):
    """Those that say how tokens are chosen, beside the table's. `num_predict` below 0: up to the context's end."""

    num_predict: Int64 | None = None
    stop: str | list[str] | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """`keep_alive`: how long the model stays; 0 without a prompt unloads it."""

    model: str | None = None
    stream: bool | None = None
    format: Format | None = None
    options: Options | None = None
    think: Think | None = None
    keep_alive: Any = None

    @property
    def is_empty(self) -> bool:
        """Nothing is to be answered: the model shall be loaded, or unloaded."""
        return True


class ChatBody(CommonBody, kw_only=True):
    """POST /api/chat"""

    messages: Annotated[list[MessageBody], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages


class GenerateBody(CommonBody, kw_only=True):
    """POST /api/generate. `raw`: the prompt goes to the model as it is."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt


class ShowBody(msgspec.Struct, kw_only=True):
    """POST /api/show"""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


# --- answers


class OllamaError(msgspec.Struct, frozen=True):
    error: str


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[CalledTool] | None = None


class StreamLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a stream, or a whole answer. `message` in a chat, else `response`. Durations are nanoseconds."""

    model: str
    created_at: str
    done: bool | None = None  # always there; its default is left out
    message: Said | None = None
    response: str | None = None
    thinking: str | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class Details(msgspec.Struct, frozen=True):
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""
    parent_model: str = ""


class Tag(msgspec.Struct, frozen=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    context_length: int


class Tags(msgspec.Struct, frozen=True):
    models: list[Tag]


class RunningModel(msgspec.Struct, frozen=True):
    """A loaded model. `size_vram`: bytes of GPU memory."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(msgspec.Struct, frozen=True):
    models: list[RunningModel]


class Show(msgspec.Struct, frozen=True):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
