"""A conversation as coding agents have it, for templates that take no such turns."""

from __future__ import annotations

from collections.abc import Callable

from tandem.server.chat.conversation import Message, ToolCall
from tandem.server.chat.history import template_messages
from tandem.server.chat.template_fit import TemplateFit
from tandem.server.chat.turns import as_taken, fit_turns

CALL = ToolCall("callnum00", "now", {})
AGENTS = (
    Message("system", "You are an agent."),
    Message("system", "You are in a sandbox."),
    Message("user", "It is Monday."),
    Message("user", "What time is it?"),
    Message("system", "There are helpers."),
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", "Noon.", tool_call_id="callnum00"),
    Message("user", "Be quick."),
    Message("assistant", "It is noon."),
    Message("assistant", "Anything else?"),
    Message("system", "One hour is left."),
    Message("user", "No."),
)


def texts_in(render: Callable[..., str], fit: TemplateFit) -> list[int]:
    """Where the texts of AGENTS stand in the prompt; -1: it was lost. Raises RequestError."""
    messages = as_taken(AGENTS, fit_turns(render))
    text = render(template_messages(messages, fit, "call"))
    return [text.find(message.content) for message in AGENTS if message.content]
