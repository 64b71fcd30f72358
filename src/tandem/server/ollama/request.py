"""Requests of Ollama's routes, read as a `Conversation` and OpenAI's sampling fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from tandem.engine.sampling.parameters import Dialect
from tandem.errors import RequestError
from tandem.server.chat.answer_grammar import NamedSchema, ResponseFormat
from tandem.server.chat.attachments import Attachment, ImageSource, Sight, joined, refused_turn
from tandem.server.chat.content import Content
from tandem.server.chat.content import joined as joined_contents
from tandem.server.chat.conversation import Conversation, Message, Tool, ToolCall, is_begun, waiting_call
from tandem.server.ollama.schema import ChatBody, CommonBody, GenerateBody, MessageBody, Options
from tandem.server.openai_schema import SamplingBody
from tandem.server.sampling_bodies import sent_parameters


def chat_of(body: ChatBody, sight: Sight) -> Conversation:
    """Raises RequestError, ApiError 400."""
    tools = tuple(
        Tool(
            t.function.name, t.function.description, t.function.parameters, bool(t.function.strict),
            f"tools[{i}].function.parameters",
        )
        for i, t in enumerate(body.tools or ())
    )
    messages = _messages(body, sight)
    begun = bool(messages) and is_begun(messages[-1])
    return Conversation(messages=messages, tools=tools, continue_final_message=begun, **_thinking(body))


def generation_of(body: GenerateBody, sight: Sight) -> Conversation:
    """Raises ApiError 400."""
    images = _images(body.images, "images", sight.of_turn(refused=True))
    system = [Message("system", body.system)] if body.system else []
    return Conversation(messages=(*system, Message("user", joined_contents((*images, body.prompt)))), **_thinking(body))


def refuse_raw_images(body: GenerateBody) -> None:
    """A raw prompt has no place for them. Raises RequestError."""
    if body.images:
        raise RequestError("images cannot stand in a raw prompt; leave out raw", "images")


def sampling_body(body: CommonBody) -> SamplingBody:
    """Raises RequestError."""
    options = body.options or Options()
    same = sent_parameters(options, Dialect.OLLAMA)
    return SamplingBody(stop=options.stop, response_format=_format(body), **same)


def _format(body: CommonBody) -> ResponseFormat | None:
    if not body.format:
        return None
    if isinstance(body.format, dict):
        return ResponseFormat("json_schema", NamedSchema(body.format))
    if body.format != "json":
        raise RequestError(f'format must be "json" or a JSON schema, not {body.format[:40]!r}', "format")
    return ResponseFormat("json_object")


def _thinking(body: CommonBody) -> dict[str, Any]:
    if isinstance(body.think, str):
        return {"reasoning_effort": body.think}
    return {"thinking": body.think}


def _messages(body: ChatBody, sight: Sight) -> tuple[Message, ...]:
    """Results of tools name no call, only the tool: they answer the calls before them in order."""
    messages: list[Message] = []
    waiting: list[ToolCall] = []
    refused = refused_turn([each.role for each in body.messages], body.tools)
    for i, each in enumerate(body.messages):
        content = _content(each, f"messages[{i}]", sight.of_turn(i == refused))
        if each.role == "tool":
            messages.append(_result(each, content, waiting))
            continue
        calls = _calls(each, f"call_{i}")
        waiting = list(calls)
        messages.append(Message(each.role, content, reasoning=each.thinking or None, tool_calls=calls))
    return tuple(messages)


def _calls(body: MessageBody, prefix: str) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(call.id or f"{prefix}_{j}", call.function.name, call.function.arguments)
        for j, call in enumerate(body.tool_calls or ())
    )


def _result(body: MessageBody, content: Content, waiting: list[ToolCall]) -> Message:
    result = Message("tool", content, name=body.tool_name, tool_call_id=body.tool_call_id)
    call = waiting_call(result, waiting)
    if call is None:
        return result
    waiting.remove(call)
    return dataclasses.replace(result, tool_call_id=call.id)


def _content(body: MessageBody, where: str, sight: Sight) -> Content:
    """Images stand beside the text here: before it, and notes of them behind it. Raises ApiError 400."""
    mixed, text = _images(body.images, f"{where}.images", sight), body.content or ""
    images = [image for image in mixed if not isinstance(image, str)]
    notes = [(note, True) for note in mixed if isinstance(note, str)]
    return joined([*((image, True) for image in images), (text, False), *notes])


def _images(images: list[str] | None, where: str, sight: Sight) -> list[Content]:
    """Raises ApiError 400."""
    return [
        Attachment("image", field="", image=ImageSource(data, bare=True)).shown(f"{where}[{i}]", sight)
        for i, data in enumerate(images or ())
    ]
