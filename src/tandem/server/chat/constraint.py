"""`constraint`: what an answer must match, so that calls are what the tools' schemas say and texts what was asked for.

It is a structural tag of xgrammar (https://xgrammar.mlc.ai), as plain data; the engine compiles it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tandem.engine.grammar.schema import check_schema
from tandem.engine.protocol import Grammar
from tandem.errors import RequestError
from tandem.server.chat.conversation import Conversation, Tool
from tandem.server.chat.formats.tool_format import Channels, ToolFormat, Written
from tandem.text.reasoning_format import ReasoningFormat

Tag = dict[str, Any]

_ANY_TEXT: Tag = {"type": "any_text"}
_MADE_UP = {"{index}": "[0-9]{1,3}", "{id}": "[a-zA-Z0-9]{9}"}  # what the model writes for these
_BREAKS: Tag = {"type": "regex", "pattern": r"\n{0,2}"}  # between reasoning and what follows


@dataclass(frozen=True, slots=True)
class Speech:
    """How a model writes answers. `in_reasoning`: this one begins with reasoning; `may_reason`: it could."""

    tool_format: ToolFormat | None
    written: Written | None
    reasoning: ReasoningFormat | None
    in_reasoning: bool
    may_reason: bool = True


def constraint(conversation: Conversation, speech: Speech, content: Grammar | None) -> Grammar | None:
    """content: of the answer's text. None: the answer may be anything. Raises RequestError where a call or a content
    cannot be promised."""
    called = bool(conversation.callable_tools) and (wants_constraint(conversation) or content is not None)
    if not called:
        return None if content is None else _content_alone(speech, content)
    required = conversation.tool_choice.mode in ("required", "named")
    if speech.tool_format is None or speech.written is None:
        _check_without_calls(conversation, content)
        return None
    _check_strict(conversation)
    parts = speech.tool_format, speech.written, speech.reasoning, speech.in_reasoning
    tag = call_constraint(conversation, *parts, content=None if required else content)
    lenient = any(not tool.strict for tool in conversation.callable_tools.values())
    return Grammar("structural_tag", json.dumps(tag), lenient)


def _check_strict(conversation: Conversation) -> None:
    """Other tools' schemas count as far as they can."""
    for tool in conversation.callable_tools.values():
        if tool.strict:
            try:
                check_schema(_schema(tool))
            except RequestError as error:
                raise RequestError(f"the parameters of {tool.name!r}: {error}", "tools") from error


def _check_without_calls(conversation: Conversation, content: Grammar | None) -> None:
    """A strict schema is tried; a call that must be made cannot be promised, nor one instead of a content."""
    why = "calls of this model cannot be constrained (the server's log says why)"
    if conversation.tool_choice.mode in ("required", "named"):
        raise RequestError(f"{why}; use tool_choice: auto", "tool_choice", "not_available")
    if content is not None:
        raise RequestError(f"{why}; leave the tools out, or what the text must match", "tools", "not_available")


def _content_alone(speech: Speech, content: Grammar) -> Grammar:
    """Reasoning is free. Where there can be none, the content is the whole answer."""
    channels = speech.tool_format.channels if speech.tool_format else None
    reasons = speech.reasoning is not None and (speech.in_reasoning or speech.may_reason)
    if not (reasons or channels):
        return content
    before = _reasoning(channels, speech.reasoning, speech.in_reasoning) if reasons else []
    body = _answer(channels, _content(content))
    tag = {"type": "structural_tag", "format": _sequence(*before, body)}
    return Grammar("structural_tag", json.dumps(tag), content.lenient)


def _content(grammar: Grammar) -> Tag:
    """A part of a structural tag that matches what the grammar does."""
    match grammar.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": _decoded(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            tag: Tag = _decoded(grammar.text)
            part: Tag = tag.get("format", tag) if isinstance(tag, dict) else tag
            return part


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"what the answer must match is not valid JSON: {error}", "grammar") from error


def _answer(channels: Channels | None, body: Tag) -> Tag:
    """Free text has no control tokens, so the channel of an answer is said here."""
    if channels is None:
        return body
    return _sequence(_const(f"{channels.channel}{channels.answer[0]}{channels.message}"), body)


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
    content: Grammar | None = None,
) -> Tag:
    """Structural tag of the whole answer, reasoning included. Where a call is required, all schemas count, `strict` or
    not. Where it is not, the answer may be `content` instead, or any text."""
    required = conversation.tool_choice.mode in ("required", "named")
    one = not conversation.parallel_tool_calls or written.single or conversation.tool_choice.mode == "named"
    tools = conversation.callable_tools.values()
    calls: Tag = {
        "type": "tags_with_separator", "tags": [_call(tool, written, tool.strict or required) for tool in tools],
        "separator": written.separator, "at_least_one": True, "stop_after_first": one,
    }  # fmt: skip
    only_calls = _sequence(_const(written.first), calls, _const(written.last))
    if required:
        body = only_calls
    elif tool_format.channels or content is not None:
        text = _ANY_TEXT if content is None else _content(content)
        body = {"type": "or", "elements": [_answer(tool_format.channels, text), only_calls]}
    else:
        body = _on_trigger(written, calls, one)
    before = _reasoning(tool_format.channels, reasoning, in_reasoning)
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
    channels: Channels | None, reasoning: ReasoningFormat | None, in_reasoning: bool
) -> list[Tag | None]:
    """Tags of the reasoning that may come before the calls, or must."""
    if reasoning is None:
        return []
    if channels:
        return [_optional(_channel(channels))]
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
