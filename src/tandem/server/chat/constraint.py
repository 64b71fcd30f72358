"""`call_constraint`: a structural tag that makes a model's calls what the tools' schemas say.

The tags are those of xgrammar (https://xgrammar.mlc.ai), as plain data; the engine compiles them.
"""

from __future__ import annotations

from typing import Any

from tandem.server.chat.conversation import Conversation, Tool
from tandem.server.chat.formats.reasoning_format import ReasoningFormat
from tandem.server.chat.formats.tool_format import Channels, ToolFormat, Written

Tag = dict[str, Any]

_ANY_TEXT: Tag = {"type": "any_text"}
_MADE_UP = {"{index}": "[0-9]{1,3}", "{id}": "[a-zA-Z0-9]{9}"}  # what the model writes for these
_BREAKS: Tag = {"type": "regex", "pattern": r"\n{0,2}"}  # between reasoning and what follows


def wants_constraint(conversation: Conversation) -> bool:
    """Whether a call must be made, or must fit its schema if it is made."""
    choice = conversation.tool_choice.mode
    strict = any(tool.strict for tool in conversation.tools)
    return choice in ("required", "named") or (choice == "auto" and strict)


def call_constraint(
    conversation: Conversation,
    tool_format: ToolFormat,
    written: Written,
    reasoning: ReasoningFormat | None,
    in_reasoning: bool,
) -> Tag:
    """Of the whole answer, reasoning included. Where a call is required, all schemas count, `strict` or not."""
    required = conversation.tool_choice.mode in ("required", "named")
    one = not conversation.parallel_tool_calls or written.single or conversation.tool_choice.mode == "named"
    tools = conversation.callable_tools.values()
    calls: Tag = {
        "type": "tags_with_separator", "tags": [_call(tool, written, tool.strict or required) for tool in tools],
        "separator": written.separator, "at_least_one": True, "stop_after_first": one,
    }  # fmt: skip
    if required:
        body = _sequence(_const(written.first), calls, _const(written.last))
    elif tool_format.channels:
        body = _answer_or(tool_format.channels, calls)
    else:
        body = _on_trigger(written, calls, one)
    before = _reasoning(tool_format, reasoning, in_reasoning)
    return {"type": "structural_tag", "format": _sequence(*before, body)}


def _on_trigger(written: Written, calls: Tag, one: bool) -> Tag:
    """Any text; where it says the trigger, calls."""
    tags = calls["tags"]
    if written.first:
        tags = [{"type": "tag", "begin": written.first, "content": calls, "end": written.last}]
    return {
        "type": "triggered_tags", "triggers": [written.triggered_by], "tags": tags, "at_least_one": False,
        "stop_after_first": one,
    }  # fmt: skip


def _answer_or(syntax: Channels, calls: Tag) -> Tag:
    """Free text has no control tokens, so the channel of an answer is said here."""
    answer = _sequence(_const(f"{syntax.channel}{syntax.answer[0]}{syntax.message}"), _ANY_TEXT)
    return {"type": "or", "elements": [answer, calls]}


def _call(tool: Tool, written: Written, by_schema: bool) -> Tag:
    arguments: Tag = {
        "type": "json_schema",
        "json_schema": _schema(tool) if by_schema else {"type": "object"},
        "style": written.style,
    }
    begin, made_up, rest = written.begin.replace("{name}", tool.name), "", ""
    for placeholder, pattern in _MADE_UP.items():
        if placeholder in begin:
            begin, _, rest = begin.partition(placeholder)
            made_up = pattern
    content = arguments
    if made_up:
        content = _sequence({"type": "regex", "pattern": made_up}, _const(rest), arguments)
    return {"type": "tag", "begin": begin, "content": content, "end": written.end}


def _schema(tool: Tool) -> dict[str, Any]:
    """A tool without parameters takes none."""
    return tool.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _reasoning(
    tool_format: ToolFormat, reasoning: ReasoningFormat | None, in_reasoning: bool
) -> list[Tag | None]:
    """What may come before the calls, or must."""
    if reasoning is None:
        return []
    if tool_format.channels:
        return [_optional(_channel(tool_format.channels))]
    begin, end = ("" if in_reasoning else reasoning.open[0]), reasoning.close[0]
    thought = _sequence({"type": "tag", "begin": begin, "content": _ANY_TEXT, "end": end}, _BREAKS)
    return [thought if in_reasoning else _optional(thought)]


def _channel(syntax: Channels) -> Tag:
    begin = f"{syntax.channel}{syntax.reasoning[0]}{syntax.message}"
    return {
        "type": "tag",
        "begin": begin,
        "content": _ANY_TEXT,
        "end": f"{syntax.end[0]}{syntax.start}assistant",
    }


def _optional(tag: Tag) -> Tag:
    return {"type": "optional", "content": tag}


def _const(text: str) -> Tag | None:
    return {"type": "const_string", "value": text} if text else None


def _sequence(*tags: Tag | None) -> Tag:
    elements = [tag for tag in tags if tag is not None]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
