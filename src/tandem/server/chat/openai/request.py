"""`conversation_of`: what a body of /v1/chat/completions asks for. Every complaint names the field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tandem.errors import RequestError
from tandem.server.chat.attachments import (
    Attachment,
    ImageSource,
    Sight,
    file_text,
    is_attachment,
    joined,
    refused_turn,
    string,
)
from tandem.server.chat.content import Content
from tandem.server.chat.conversation import (
    Conversation,
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    allowed_tools,
    waiting_call,
)
from tandem.server.chat.openai.schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    ToolBody,
    ToolCallBody,
    ToolChoiceBody,
)
from tandem.server.errors import ApiError

_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip

_THOUGHTS = ("thinking", "reasoning")  # types of parts


def conversation_of(body: ChatRequest, sight: Sight) -> Conversation:
    """Raises RequestError, ApiError 400."""
    tools, choice = _choice(body, _tools(body))
    return Conversation(
        messages=tuple(_messages(body.messages, body.tools, sight)),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_variables=body.chat_template_kwargs or {},
        thinking=_thinking(body),
        reasoning_effort=body.reasoning_effort,
        thinking_budget=_budget(body),
        separate_reasoning=body.separate_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message) or _is_begun(body),
    )


def _is_begun(body: ChatRequest) -> bool:
    """By the last message, as at DeepSeek and Mistral. Raises RequestError."""
    for i, message in enumerate(body.messages):
        last = i == len(body.messages) - 1
        if message.prefix and not (last and message.role == "assistant"):
            text = f"messages[{i}].prefix: only the last message, an assistant's, can be continued"
            raise RequestError(text, f"messages[{i}].prefix")
    return bool(body.messages[-1].prefix)


def _tools(body: ChatRequest) -> tuple[Tool, ...]:
    tools = tuple(
        Tool(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            bool(tool.function.strict),
            f"tools[{i}].function.parameters",
        )
        for i, tool in enumerate(body.tools or ())
    )
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"tools[{i}]: there are two functions {name!r}", f"tools[{i}].function.name")
    return tools


def _choice(body: ChatRequest, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model is told of, and how it may call them. Raises RequestError."""
    choice = body.tool_choice
    if isinstance(choice, ToolChoiceBody) and choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise RequestError("tool_choice.allowed_tools is missing", "tool_choice.allowed_tools")
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        tools, choice = allowed_tools(tools, names), choice.allowed_tools.mode
    if choice is None or choice in ("auto", "none"):
        return tools, ToolChoice("none" if choice == "none" else "auto")
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if not isinstance(choice, ToolChoiceBody):
        return tools, ToolChoice("required")
    if choice.function is None:
        raise RequestError("tool_choice.function is missing", "tool_choice.function")
    allowed_tools(tools, [choice.function.name])
    return tools, ToolChoice("named", choice.function.name)


def _thinking(body: ChatRequest) -> bool | None:
    if body.thinking is None or body.enable_thinking is not None:
        return body.enable_thinking
    return body.thinking.type == "enabled"


def _budget(body: ChatRequest) -> int | None:
    """Its three names."""
    thinking = body.thinking.budget_tokens if body.thinking else None
    return next(
        (b for b in (body.thinking_budget, body.thinking_token_budget, thinking) if b is not None), None
    )


def _messages(
    bodies: Sequence[ChatMessage], tools: Sequence[ToolBody] | None, sight: Sight
) -> Iterator[Message]:
    refused = refused_turn([message.role for message in bodies], tools)
    calls: list[ToolCall] = []  # whose results are waited for
    for i, body in enumerate(bodies):
        message = _message(body, f"messages[{i}]", sight.of_turn(i == refused))
        if message.role == "tool":
            message = _answering(message, calls, f"messages[{i}]")
        elif message.role == "assistant":
            calls = list(message.tool_calls)
        yield message


def _answering(result: Message, calls: list[ToolCall], where: str) -> Message:
    """Raises RequestError where no call waits for it, and it names none."""
    call = waiting_call(result, [call for call in calls if result.tool_call_id in (None, call.id)])
    if call is not None:
        calls.remove(call)
        return replace(result, tool_call_id=call.id)
    if result.tool_call_id is None:
        text = f"{where}.tool_call_id is missing; say whose result this is"
        raise RequestError(text, f"{where}.tool_call_id")
    return result


def _message(message: ChatMessage, where: str, sight: Sight) -> Message:
    if message.role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise RequestError(f"{where}.role must be one of {roles}, not {message.role[:40]!r}", f"{where}.role")
    role = _ROLES[message.role]
    if message.tool_calls and role != "assistant":
        raise RequestError(f"{where}.tool_calls: only assistants call tools", f"{where}.tool_calls")
    thoughts, parts = _split(message)
    return Message(
        role,
        _content(parts, message.refusal, role, where, sight),
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning or thoughts,
        tool_calls=tuple(
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
    )


def _call(call: ToolCallBody, where: str) -> ToolCall:
    return ToolCall(call.id or where, call.function.name, call.function.arguments)


def _split(message: ChatMessage) -> tuple[str | None, str | list[ContentPart] | None]:
    """An assistant's thoughts, and what else it said."""
    if message.role != "assistant" or not isinstance(message.content, list):
        return None, message.content
    thoughts = [part for part in message.content if part.type in _THOUGHTS]
    rest = [part for part in message.content if part.type not in (*_THOUGHTS, "redacted_thinking")]
    return "\n\n".join(filter(None, map(_thought, thoughts))) or None, rest


def _thought(part: ContentPart) -> str:
    """Mistral's are lists of text parts."""
    if isinstance(part.thinking, list):
        return "".join(each.text or "" for each in part.thinking)
    return part.thinking or part.text or ""


def _content(
    content: str | list[ContentPart] | None, refusal: str | None, role: Role, where: str, sight: Sight
) -> Content:
    """An assistant may have said nothing, or refused; a tool may have found nothing."""
    if content is None:
        if role in ("assistant", "tool"):
            return refusal or ""
        raise RequestError(f"{where}.content is missing; send a string", f"{where}.content")
    if isinstance(content, str):
        return content
    return joined(_part(part, f"{where}.content[{i}]", sight) for i, part in enumerate(content))


def _part(part: ContentPart, where: str, sight: Sight) -> tuple[Content, bool]:
    """Content that the model reads or sees of a part, and whether it was attached. Raises ApiError 400."""
    if part.type in ("text", "refusal"):
        return part.text or part.refusal or "", False
    if not is_attachment(part.type):
        text = f"{where}: only text parts are served, not {part.type[:40]!r}"
        raise ApiError(400, text, param=f"{where}.type", code="not_available")
    file = part.file if isinstance(part.file, dict) else {}
    name = string(file.get("filename"))
    content = file_text(string(file.get("file_data")), name)
    source, field = _image(part)
    return Attachment(part.type, name, content, image=source, image_field=field).shown(where, sight), True


def _image(part: ContentPart) -> tuple[ImageSource | None, str]:
    """An image's source, and its field."""
    if part.type in ("image_url", "input_image"):
        source, field = part.image_url, ".image_url"
        if isinstance(source, dict):
            return ImageSource(source.get("url"), source.get("detail")), f"{field}.url"
        return ImageSource(source, part.detail), field
    if part.type == "image":
        return ImageSource(part.image or part.url, part.detail, bare=True), ".image"
    return None, ""
