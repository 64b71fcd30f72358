"""`template_messages`: a conversation as the checkpoint's chat template wants it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tandem.server.chat.content import Content, template_content
from tandem.server.chat.conversation import Conversation, Message, ToolCall
from tandem.server.chat.formats.tool_format import CallIds
from tandem.server.chat.reading.calls import short_id
from tandem.server.chat.template_fit import TemplateFit, TemplateMessages
from tandem.server.chat.tools_in_text import arguments_object


def template_messages(messages: Iterable[Message], fit: TemplateFit, ids: CallIds) -> TemplateMessages:
    """`ids`: of calls as the template wants them; others are replaced, in calls and results alike."""
    listed = list(messages)
    if not fit.several:
        listed = list(_one_call_each(listed))
    calls = [call for message in listed for call in message.tool_calls]
    names = {call.id: call.name for call in calls}
    renamed = {call.id: _id(call, index, ids) for index, call in enumerate(calls)}
    return [_message(message, fit, names, renamed) for message in listed]


def _id(call: ToolCall, index: int, ids: CallIds) -> str:
    if ids == "short":
        return short_id(call.id)
    if ids == "numbered" and not re.fullmatch(rf"(functions\.)?{re.escape(call.name)}:\d+", call.id):
        return f"functions.{call.name}:{index}"
    return call.id


def _message(
    message: Message, fit: TemplateFit, names: dict[str, str], renamed: dict[str, str]
) -> dict[str, Any]:
    """`names`: of the tools, by the ids of calls."""
    result: dict[str, Any] = {"role": message.role, "content": template_content(message.content)}
    name = message.name
    if message.role == "tool":
        call_id = message.tool_call_id or ""
        result["tool_call_id"] = renamed.get(call_id, call_id)
        name = name or names.get(call_id)
    if message.tool_calls:
        result["content"] = template_content(message.content) or fit.empty
        result["tool_calls"] = [_call(call, fit, renamed[call.id]) for call in message.tool_calls]
    if message.reasoning:
        _add_reasoning(result, message.reasoning, fit)
    return result if name is None else result | {"name": name}


def _call(call: ToolCall, fit: TemplateFit, call_id: str) -> dict[str, Any]:
    arguments: str | dict[str, Any] = arguments_object(call.arguments)
    if fit.arguments == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _add_reasoning(result: dict[str, Any], reasoning: str, fit: TemplateFit) -> None:
    """Under the key that the template reads. One that reads "thinking" takes no text beside it in a call."""
    if fit.reasoning == "blocks":
        text = [{"type": "text", "text": result["content"]}] if result["content"] else []
        result["content"] = [{"type": "thinking", "thinking": reasoning}, *text]
    elif fit.reasoning == "thinking" and result.get("tool_calls") and result["content"]:
        result["thinking"], result["content"] = f"{reasoning}\n\n{result['content']}", ""
    else:
        result[fit.reasoning] = reasoning


def _one_call_each(messages: list[Message]) -> Iterator[Message]:
    """For templates that take one call in a message: each call, then its result."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            yield message
            continue
        results = []
        while at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        yield from _in_turn(message, results)


def _in_turn(message: Message, results: list[Message]) -> Iterator[Message]:
    left = list(results)
    for index, call in enumerate(message.tool_calls):
        content: Content = message.content if index == 0 else ""
        thought = message.reasoning if index == 0 else None
        yield Message("assistant", content, message.name, thought, (call,))
        for reply in [r for r in left if r.tool_call_id == call.id]:
            left.remove(reply)
            yield reply
    yield from left


def earlier_calls(conversation: Conversation) -> int:
    """For ids that count the calls of a conversation."""
    return sum(len(message.tool_calls) for message in conversation.messages)
