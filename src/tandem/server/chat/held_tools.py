"""`held_tools`: strict tools whose schemas say more than calls can be held to are held to the rest of it."""

from __future__ import annotations

import re
from dataclasses import replace

from tandem.engine.grammar.loosened import loosened
from tandem.errors import RequestError
from tandem.server.chat.conversation import Conversation, Tool

_MOST_CHARS = 128
_OTHER_CHARS = re.compile(r"[^A-Za-z0-9_.-]")


def held_tools(conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
    """The conversation that calls are held to, and the places of what was left out, as clients name them. Agents send
    the same tools with every request: a refusal would end their work for what few answers would break."""
    if conversation.tool_choice.mode == "none" or not any(tool.strict for tool in conversation.tools):
        return conversation, ()
    loose = [_held(tool) for tool in conversation.tools]
    unheld = tuple(place for _, places in loose for place in places)
    return replace(conversation, tools=tuple(tool for tool, _ in loose)), unheld


def _held(tool: Tool) -> tuple[Tool, list[str]]:
    if not tool.strict:
        return tool, []
    try:
        parameters, places = loosened(tool.parameters)
    except (RequestError, TypeError, AttributeError, RecursionError):  # whoever checks the schema says what is wrong
        return tool, []
    return replace(tool, parameters=parameters), [_named(tool, place) for place in places]


def _named(tool: Tool, place: str) -> str:
    """ "#/properties/tags/uniqueItems" as a header shows it."""
    return (tool.where + _OTHER_CHARS.sub("_", place[1:].replace("/", ".")))[:_MOST_CHARS]
