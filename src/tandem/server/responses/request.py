"""`conversation_of`: what a body of /v1/responses asks for. Every complaint names the field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.errors import RequestError
from tandem.server.chat.attachments import (
    Attachment,
    ImageSource,
    Sight,
    file_text,
    is_attachment,
    joined,
    refused_turn,
)
from tandem.server.chat.content import Content, text_of
from tandem.server.chat.content import joined as joined_contents
from tandem.server.chat.conversation import (
    Conversation,
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    allowed_tools,
)
from tandem.server.errors import ApiError
from tandem.server.responses.schema import Item, Part, ResponsesRequest, ToolBody, ToolChoiceBody
from tandem.server.responses.tools import joined_name

_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_IMAGES = ("input_image", "image_url", "computer_screenshot")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ASSISTANT = ("reasoning", *_CALLS)  # items that are an assistant's, as are its messages
# What OpenAI ran itself, in a conversation that was begun there: the model can do nothing with them.
_LEFT_OUT = ("web_search_call", "image_generation_call", "tool_search_call", "tool_search_output", "file_search_call")
_ROLES: dict[str, Role] = {
    "user": "user", "assistant": "assistant", "system": "system", "developer": "system",
}  # fmt: skip


def conversation_of(
    body: ResponsesRequest, earlier: Sequence[Message], tools: Sequence[Tool], sight: Sight
) -> Conversation:
    """earlier: what was said up to the end of the previous response. Raises RequestError, ApiError 400."""
    system = [Message("system", body.instructions)] if body.instructions else []
    messages = (*system, *earlier, *input_messages(body, sight))
    offered, choice = _choice(body, tuple(tools))
    return Conversation(
        messages=messages,
        tools=offered,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )


def input_messages(body: ResponsesRequest, sight: Sight) -> tuple[Message, ...]:
    """Raises RequestError, ApiError 400."""
    if isinstance(body.input, str):
        return (Message("user", body.input),)
    return tuple(_messages(body.input, body.tools, sight))


def _messages(
    items: Sequence[Item], tools: Sequence[ToolBody] | None, sight: Sight
) -> Iterator[Message]:
    """Messages of the items. An assistant's thoughts, text and calls in a row are one message."""
    turn, refused = _ResponseTurn(sight), refused_turn([_speaker(item) for item in items], tools)
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if item.type in _LEFT_OUT:
            continue
        if item.type in _ASSISTANT or (item.type == "message" and item.role == "assistant"):
            if turn.is_over(item):
                yield from turn.end()
            turn.add(item, where)
            continue
        yield from turn.end()
        yield _message(item, where, sight.of_turn(i == refused))
    yield from turn.end()


def _speaker(item: Item) -> str:
    if item.type in _OUTPUTS:
        return "tool"
    return "assistant" if item.type in (*_ASSISTANT, *_LEFT_OUT) else item.role or ""


class _ResponseTurn:
    """An assistant's."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight
        self._thoughts: list[Content] = []
        self._texts: list[Content] = []
        self._calls: list[ToolCall] = []

    def is_over(self, item: Item) -> bool:
        """Behind calls only calls belong to the same turn."""
        return bool(self._calls) and item.type not in _CALLS

    def add(self, item: Item, where: str) -> None:
        if item.type == "reasoning":
            self._thoughts.append(self._text(item.content, f"{where}.content") or self._text(item.summary, where))
        elif item.type in _CALLS:
            self._calls.append(_call(item, where))
        else:
            self._texts.append(self._text(item.content, f"{where}.content"))

    def _text(self, parts: str | Sequence[Part] | None, where: str) -> Content:
        return _text(parts, where, self._sight)

    def end(self) -> Iterator[Message]:
        if self._thoughts or self._texts or self._calls:
            reasoning = text_of(joined_contents(self._thoughts, "\n\n")) or None
            text = joined_contents(self._texts, "\n\n")
            yield Message("assistant", text, reasoning=reasoning, tool_calls=tuple(self._calls))
        self._thoughts, self._texts, self._calls = [], [], []


def _call(item: Item, where: str) -> ToolCall:
    if item.call_id is None or item.name is None:
        missing = "call_id" if item.call_id is None else "name"
        raise RequestError(f"{where}.{missing} is missing", f"{where}.{missing}")
    custom = item.type == "custom_tool_call"
    arguments: str | dict[str, str] = {"input": item.input or ""} if custom else item.arguments or ""
    return ToolCall(item.call_id, joined_name(item.namespace, item.name), arguments)


def _message(item: Item, where: str, sight: Sight) -> Message:
    if item.type in _OUTPUTS:
        if item.call_id is None:
            text = f"{where}.call_id is missing; say whose output this is"
            raise RequestError(text, f"{where}.call_id")
        return Message("tool", _text(item.output, f"{where}.output", sight), tool_call_id=item.call_id)
    if item.type != "message":
        text = f"{where}.type: {item.type[:40]!r} is not served"
        raise ApiError(400, text, param=f"{where}.type", code="not_available")
    if item.role is None or item.content is None:
        missing = "role" if item.role is None else "content"
        raise RequestError(f"{where}.{missing} is missing", f"{where}.{missing}")
    return Message(_ROLES[item.role], _text(item.content, f"{where}.content", sight))


def _text(parts: str | Sequence[Part] | None, where: str, sight: Sight) -> Content:
    if parts is None or isinstance(parts, str):
        return parts or ""
    return joined(_part(part, f"{where}[{i}]", sight) for i, part in enumerate(parts))


def _part(part: Part, where: str, sight: Sight) -> tuple[Content, bool]:
    """Content that the model reads or sees of a part, and whether it was attached. Raises ApiError 400."""
    if part.type in _TEXTS:
        return part.text or part.refusal or "", False
    if not is_attachment(part.type):
        text = f"{where}: only text parts are served, not {part.type[:40]!r}"
        raise ApiError(400, text, param=f"{where}.type", code="not_available")
    content = file_text(part.file_data, part.filename)
    source = ImageSource(part.image_url, part.detail) if part.type in _IMAGES else None
    attached = Attachment(part.type, part.filename, content, image=source, image_field=".image_url")
    return attached.shown(where, sight), True


def _choice(body: ResponsesRequest, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model is told of, and how it may call them. Raises RequestError."""
    choice = body.tool_choice
    if isinstance(choice, ToolChoiceBody) and choice.type == "allowed_tools":
        names = [joined_name(one.namespace, one.name) for one in choice.tools if one.name is not None]
        tools, choice = allowed_tools(tools, names), choice.mode
    if choice is None or choice in ("auto", "none"):
        return tools, ToolChoice("none" if choice == "none" else "auto")
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if not isinstance(choice, ToolChoiceBody):
        return tools, ToolChoice("required")
    if choice.name is None:
        raise RequestError("tool_choice.name is missing", "tool_choice.name")
    name = joined_name(choice.namespace, choice.name)
    allowed_tools(tools, [name])
    return tools, ToolChoice("named", name)
