"""Tools for chat templates that know none: described in a system message, calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tandem.server.chat.content import Content, joined
from tandem.server.chat.conversation import Message, Tool
from tandem.server.chat.formats.tool_format import ToolFormat
from tandem.server.chat.formats.writing import write_calls
from tandem.server.chat.reading.json_text import without_lone_surrogates

_DESCRIPTION = """# Tools

You may call functions to answer. These are the functions, one in each line:
<tools>
{tools}
</tools>

To call a function, write exactly this, with the function's name and with its own arguments:
{example}"""
_RESULT = ("<tool_response>\n", "\n</tool_response>")


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """As OpenAI's requests and all chat templates have it."""
    parameters = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def described(tools: Iterable[Tool], tool_format: ToolFormat) -> str:
    """Description of `tools` that the model needs to call them."""
    lines = (json.dumps(tool_for_template(tool)["function"], ensure_ascii=False) for tool in tools)
    example = write_calls(tool_format, [("NAME", {"PARAMETER": "VALUE"})])
    return _DESCRIPTION.format(tools="\n".join(lines), example=example)


def with_system_text(messages: Sequence[Message], text: str, system: bool) -> tuple[Message, ...]:
    """`text` at the end of the system message. `system` False: the template takes none, the first user says it."""
    first = messages[0] if messages else None
    if first is not None and first.role == "system" and system:
        return (Message("system", joined((first.content, "\n\n", text))), *messages[1:])
    if system:
        return (Message("system", text), *messages)
    for i, message in enumerate(messages):
        if message.role == "user":
            user = Message("user", joined((text, "\n\n", message.content)), name=message.name)
            return (*messages[:i], user, *messages[i + 1 :])
    return (Message("user", text), *messages)


def as_text(messages: Iterable[Message], tool_format: ToolFormat) -> tuple[Message, ...]:
    """Calls as the assistant wrote them, results as what the user says next."""
    turns: list[Message] = []
    for message in messages:
        if message.role == "tool":
            result = joined((_RESULT[0], message.content, _RESULT[1]))
            if turns and turns[-1].role == "user":
                result = joined((turns.pop().content, "\n", result))
            turns.append(Message("user", result))
        elif message.tool_calls:
            calls = write_calls(
                tool_format, [(c.name, arguments_object(c.arguments)) for c in message.tool_calls]
            )
            content: Content = joined((message.content, "\n", calls)) if message.content else calls
            turns.append(Message("assistant", content, reasoning=message.reasoning))
        else:
            turns.append(message)
    return tuple(turns)


def arguments_object(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """A call's arguments as templates want them. What is no JSON object was refused by the tool, and is told as it
    was written. No string has lone surrogates: neither a template's process nor an answer could take them."""
    if isinstance(arguments, dict):
        return arguments
    arguments = without_lone_surrogates(arguments)
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
