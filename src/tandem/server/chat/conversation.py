"""`Conversation`: what is said and what is asked for, the same for every chat dialect.

Dialects check their own fields and name them in their errors; here everything is well-formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.errors import RequestError
from tandem.server.chat.content import Content

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of an earlier turn. `arguments`: JSON text as the client sent it, or an object."""

    id: str
    name: str
    arguments: str | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. A dialect joins text parts; what becomes of others, `attachments.py` says.

    `reasoning` and `tool_calls` belong to assistants, `tool_call_id` to tools. A tool's `name` may be left out where
    `tool_call_id` names a call of the conversation.
    """

    role: Role
    content: Content = ""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


def is_begun(last: Message) -> bool:
    """Whether the client has begun the answer, in dialects where the last turn alone says so."""
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def waiting_call(result: Message, calls: Sequence[ToolCall]) -> ToolCall | None:
    """The call that a tool's result answers: that of its id, else the first of its name, or of any. calls: those that
    wait for a result."""
    same = [call for call in calls if call.id == result.tool_call_id]
    return next(iter(same or [call for call in calls if result.name in (None, call.name)]), None)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: JSON schema of an object. `strict`: calls must fit it.
    `where`: the parameters stand in the client's body."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    where: str = "tools"


def allowed_tools(tools: Sequence[Tool], names: Sequence[str]) -> tuple[Tool, ...]:
    """Those that a request's tool_choice allows: the model is told of no others. Raises RequestError."""
    for name in names:
        if name not in {tool.name for tool in tools}:
            raise RequestError(f"tool_choice names {name[:100]!r}, which is not among tools", "tool_choice")
    return tuple(tool for tool in tools if tool.name in names)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """ "required": at least one call; "named": one call of the tool `name`."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """`template_variables` are passed to the chat template as they are (`chat_template_kwargs`).

    `thinking`: whether the model should reason first; None leaves it alone. `reasoning_effort`: "none", "low", "high"
    or whatever else the template knows. `thinking_budget`: tokens. What the template has no switch for is refused.
    `separate_reasoning` False: reasoning stays in the text, with its markers.
    `continue_final_message`: the answer goes on with the last message, which is an assistant's.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template_variables: dict[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def callable_tools(self) -> dict[str, Tool]:
        """By name, those that the answer may call."""
        if self.tool_choice.mode == "none":
            return {}
        named = self.tool_choice.name if self.tool_choice.mode == "named" else None
        return {tool.name: tool for tool in self.tools if named in (None, tool.name)}
