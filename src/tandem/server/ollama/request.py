"""What bodies of Ollama's routes ask for: a `Conversation`, and OpenAI's sampling fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from tandem.errors import RequestError
from tandem.server.chat.answer_grammar import NamedSchema, ResponseFormat
from tandem.server.chat.attachments import Attachment, joined, refused_turn
from tandem.server.chat.conversation import Conversation, Message, Tool, ToolCall, is_begun, waiting_call
from tandem.server.ollama.schema import ChatBody, CommonBody, GenerateBody, MessageBody, Options
from tandem.server.openai_schema import SamplingBody

_IMAGE = Attachment("image", field="")


def chat_of(body: ChatBody, unread: list[str]) -> Conversation:
    """unread: gets the places of what the model cannot read. Raises RequestError, ApiError 400."""
    tools = tuple(
        Tool(
            t.function.name, t.function.description, t.function.parameters, bool(t.function.strict),
            f"tools[{i}].function.parameters",
        )
        for i, t in enumerate(body.tools or ())
    )
    messages = _messages(body, unread)
    begun = bool(messages) and is_begun(messages[-1])
    return Conversation(messages=messages, tools=tools, continue_final_message=begun, **_thinking(body))


def generation_of(body: GenerateBody) -> Conversation:
    """Raises ApiError 400."""
    for i in range(len(body.images or ())):
        _IMAGE.shown(f"images[{i}]", None)
    system = [Message("system", body.system)] if body.system else []
    return Conversation(messages=(*system, Message("user", body.prompt)), **_thinking(body))


def sampling_body(body: CommonBody) -> SamplingBody:
    """Raises RequestError."""
    options = body.options or Options()
    return SamplingBody(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
        seed=options.seed,
        stop=options.stop,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        response_format=_format(body),
    )


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


def _messages(body: ChatBody, unread: list[str]) -> tuple[Message, ...]:
    """Results of tools name no call, only the tool: they answer the calls before them in order."""
    messages: list[Message] = []
    waiting: list[ToolCall] = []
    refused = refused_turn([each.role for each in body.messages], body.tools)
    for i, each in enumerate(body.messages):
        turn = _with_notes(each, f"messages[{i}]", None if i == refused else unread)
        if turn.role == "tool":
            messages.append(_result(turn, waiting))
            continue
        calls = _calls(turn, f"call_{i}")
        waiting = list(calls)
        messages.append(
            Message(turn.role, turn.content or "", reasoning=turn.thinking or None, tool_calls=calls)
        )
    return tuple(messages)


def _calls(body: MessageBody, prefix: str) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(call.id or f"{prefix}_{j}", call.function.name, call.function.arguments)
        for j, call in enumerate(body.tool_calls or ())
    )


def _result(body: MessageBody, waiting: list[ToolCall]) -> Message:
    result = Message("tool", body.content or "", name=body.tool_name, tool_call_id=body.tool_call_id)
    call = waiting_call(result, waiting)
    if call is None:
        return result
    waiting.remove(call)
    return dataclasses.replace(result, tool_call_id=call.id)


def _with_notes(body: MessageBody, where: str, unread: list[str] | None) -> MessageBody:
    """Images stand beside the text here. Raises ApiError 400 where unread is None."""
    notes = [_IMAGE.shown(f"{where}.images[{i}]", unread) for i in range(len(body.images or ()))]
    if not notes:
        return body
    parts = [(body.content or "", False), *((note, True) for note in notes)]
    return msgspec.structs.replace(body, content=joined(parts))
