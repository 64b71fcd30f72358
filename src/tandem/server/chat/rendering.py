"""`PromptRenderer`: conversations through the checkpoint's chat template, with control tokens of users as text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tandem.engine.limits import TOO_LONG
from tandem.errors import RequestError
from tandem.server.chat.content import Image, images_of, text_of
from tandem.server.chat.conversation import Conversation, Role
from tandem.server.chat.formats.tool_format import ToolFormat
from tandem.server.chat.history import template_messages
from tandem.server.chat.template_fit import TemplateFit, TemplateMessages
from tandem.server.chat.tools_in_text import as_text, described, tool_for_template, with_system_text
from tandem.server.chat.turns import TurnOrders, as_taken, shown_by_user
from tandem.server.limits import MAX_TEXT_CHARS
from tandem.text.chat_template import ChatTemplate
from tandem.text.markers import MarkerGuard
from tandem.text.prompt import Prompt, UnrenderedPrompt, draft
from tandem.text.reasoning_format import ReasoningFormat

_RESERVED = frozenset(("messages", "self", "tools"))
_SWITCHES = ("enable_thinking", "thinking", "thinking_mode")  # names under which templates have it
_EFFORTS = ("reasoning_effort", "thinking_effort")
_NO_EFFORT = ("none", "minimal")


class TemplateTokenizer(Protocol):
    """Part of `tandem.text.tokenizer.Tokenizer` that rendering needs."""

    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def guard(self) -> MarkerGuard | None: ...


class Render(Protocol):
    """`PromptReader.render`."""

    async def __call__(
        self, messages: TemplateMessages, add_generation_prompt: bool = True, **variables: Any
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Speaking:
    """How a model speaks of tools and reasoning.

    `describe`: the template says nothing of tools, a system message does. `calls_as_text`: nor does it write calls.
    `image_roles`: whose messages may have images; none where images are not shown.
    """

    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    fit: TemplateFit = field(default_factory=TemplateFit)
    turns: TurnOrders = field(default_factory=TurnOrders)
    describe: bool = False
    calls_as_text: bool = False
    image_roles: frozenset[Role] = frozenset()

    def markers(self) -> set[str]:
        """Texts that must reach the parser even where they are special tokens."""
        formats = (self.tool_format, self.reasoning_format)
        return {marker for one in formats if one is not None for marker in one.markers()}


class Rendered(NamedTuple):
    """images: in the order in which the prompt has their placeholders."""

    prompt: Prompt
    images: tuple[Image, ...]


class PromptRenderer:
    def __init__(self, tokenizer: TemplateTokenizer, render: Render, speaking: Speaking) -> None:
        template = tokenizer.chat_template
        self._names = template.names if template else frozenset[str]()
        self._guard = tokenizer.guard
        self._render = render
        self._speaking = speaking

    async def render(self, conversation: Conversation) -> Rendered:
        """Raises RequestError, ApiError 500."""
        _check_length(conversation)
        messages, images = self._messages(conversation)
        variables = self._variables(conversation)
        goes_on = conversation.continue_final_message
        prompted = bool(variables.pop("add_generation_prompt", conversation.add_generation_prompt and not goes_on))
        one = draft(messages, variables, self._guard, self._own_markers, goes_on)
        text = await self._render(one.messages, prompted, **one.variables)
        return Rendered(one.prompt(text, await self._opening(one) if goes_on else None), images)

    async def _opening(self, one: UnrenderedPrompt) -> str | None:
        """The text with which a template begins an answer to the messages before the last."""
        try:
            return await self._render(one.messages[:-1], True, **one.variables)
        except RequestError:
            return None

    def _own_markers(self, role: str, key: str) -> Collection[str]:
        """An assistant may have said calls and reasoning in the format's own markers."""
        return self._speaking.markers() if role == "assistant" and key != "tool_calls" else ()

    def _messages(self, conversation: Conversation) -> tuple[TemplateMessages, tuple[Image, ...]]:
        """As the template takes them, and their images in the order in which it shows them."""
        speaking, messages = self._speaking, conversation.messages
        if speaking.tool_format and speaking.calls_as_text:
            messages = as_text(messages, speaking.tool_format)
        messages = as_taken(shown_by_user(messages, speaking.image_roles), speaking.turns)
        if speaking.tool_format and speaking.describe and (tools := _offered(conversation)):
            text = described(tools, speaking.tool_format)
            messages = with_system_text(messages, text, speaking.turns.system)
        ids = speaking.tool_format.ids if speaking.tool_format else "call"
        images = tuple(image for message in messages for image in images_of(message.content))
        return template_messages(messages, speaking.fit, ids), images

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        variables = conversation.template_variables
        for name in variables:
            if name in _RESERVED:
                raise RequestError(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")
        offered = [] if self._speaking.describe else _offered(conversation)
        tools = {"tools": [tool_for_template(tool) for tool in offered]} if offered else {}
        return tools | self._switches(conversation) | variables

    def _switches(self, conversation: Conversation) -> dict[str, Any]:
        """Variables of the template that say how much to reason. Raises RequestError where it has none."""
        names = self._names
        thinking, effort, switches = conversation.thinking, conversation.reasoning_effort, dict[str, Any]()
        if effort is not None:
            known = [name for name in _EFFORTS if name in names]
            switches |= dict.fromkeys(known, effort)
            if not known:
                thinking = effort not in _NO_EFFORT if thinking is None else thinking
        if conversation.thinking_budget is not None:
            switches["thinking_budget"] = conversation.thinking_budget
            if "thinking_budget" not in names:
                raise _no_switch("thinking_budget")
        if thinking is not None:
            switches |= self._thinking(
                thinking, names, "enable_thinking" if effort is None else "reasoning_effort"
            )
        return switches

    def _thinking(self, thinking: bool, names: frozenset[str], parameter: str) -> dict[str, Any]:
        values = {"enable_thinking": thinking, "thinking": thinking}
        switches = {
            name: values.get(name, "enabled" if thinking else "disabled")
            for name in _SWITCHES
            if name in names
        }
        always = thinking and self._speaking.reasoning_format is not None
        never = not thinking and self._speaking.reasoning_format is None
        if not (switches or always or never):
            raise _no_switch(parameter)
        return switches


def _check_length(conversation: Conversation) -> None:
    """No context holds so much text; templates take many times its memory. Raises RequestError."""
    chars = sum(len(text_of(message.content)) for message in conversation.messages)
    if chars > MAX_TEXT_CHARS:
        text = f"prompt is too long: the messages have {chars:,} characters, and {MAX_TEXT_CHARS:,} are the most"
        raise RequestError(text, "messages", TOO_LONG)


def _offered(conversation: Conversation) -> list[Any]:
    return [] if conversation.tool_choice.mode == "none" else list(conversation.tools)


def _no_switch(name: str) -> RequestError:
    text = f"{name}: the model's chat template has no such switch; leave it out, or try chat_template_kwargs"
    return RequestError(text, name)
