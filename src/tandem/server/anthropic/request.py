"""`conversation_of`: what a body of /v1/messages asks for. Every complaint names the field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from tandem.errors import RequestError
from tandem.server.anthropic.schema import Block, CountRequest, MessageBody, ToolBody
from tandem.server.chat.conversation import (
    IMAGES,
    UNSEEN,
    Conversation,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    is_begun,
)
from tandem.server.errors import ApiError

_BETWEEN = "\n\n"  # blocks and turns that become one text
_BILLING = "x-anthropic-billing-header:"  # what a system block of Claude Code's begins with that no model is to read

Placed = tuple[str, Block]  # where it stands in the body


def conversation_of(body: CountRequest) -> Conversation:
    """Raises RequestError, ApiError 400."""
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    system = _system(body)
    messages = [*system, *_turns(body.messages)]
    if all(message.role == "system" for message in messages):
        raise RequestError("messages: all content is empty", "messages")
    choice, thinking, output = body.tool_choice, body.thinking, body.output_config
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        thinking=_thinking(body),
        thinking_budget=thinking.budget_tokens if thinking else None,
        reasoning_effort=output.effort if output else None,
        continue_final_message=is_begun(messages[-1]),
    )


def _thinking(body: CountRequest) -> bool | None:
    """None: as the model does by itself."""
    if body.thinking is None or body.thinking.type == "between_tools":
        return None
    return body.thinking.type != "disabled"


def _system(body: CountRequest) -> list[Message]:
    if not body.system:
        return []
    if isinstance(body.system, str):
        return [Message("system", body.system)]
    blocks = [(f"system[{i}]", block) for i, block in enumerate(body.system)]
    # It differs from one conversation to the next, at the very beginning: no prompt would be found in the prefix cache.
    said = [placed for placed in blocks if not (placed[1].text or "").startswith(_BILLING)]
    return [Message("system", _text(said))] if said else []


def _tool(tool: ToolBody, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        text = f"{where}.type: only tools of your own are served, not {tool.type[:40]!r}"
        raise ApiError(400, text, param=f"{where}.type", code="not_available")
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is missing", f"{where}.input_schema")
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))


def _tool_choice(body: CountRequest, tools: Sequence[Tool]) -> ToolChoice:
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"tools[{i}].name: there are two tools {name!r}", f"tools[{i}].name")
    choice = body.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return ToolChoice("none" if choice and choice.type == "none" else "auto")
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice.type == "any":
        return ToolChoice("required")
    if choice.name not in names:
        text = f"tool_choice.name: {(choice.name or '')[:100]!r} is not among tools"
        raise RequestError(text, "tool_choice.name")
    return ToolChoice("named", choice.name)


# --- turns


def _turns(bodies: Iterable[MessageBody]) -> Iterator[Message]:
    """Consecutive turns of one role are one turn."""
    numbered = enumerate(bodies)
    for role, several in groupby(numbered, key=lambda each: each[1].role):
        blocks = [placed for i, body in several for placed in _blocks(body, f"messages[{i}]")]
        if role == "system":
            yield Message("system", _text(blocks))
        else:
            yield from _assistant(blocks) if role == "assistant" else _user(blocks)


def _blocks(body: MessageBody, where: str) -> list[Placed]:
    if isinstance(body.content, str):
        return [(f"{where}.content", Block("text", body.content))]
    return [(f"{where}.content[{i}]", block) for i, block in enumerate(body.content)]


def _user(blocks: list[Placed]) -> Iterator[Message]:
    """Results of tools are messages of their own."""
    for is_result, group in groupby(blocks, key=lambda placed: placed[1].type == "tool_result"):
        if is_result:
            yield from (_result(where, block) for where, block in group)
        else:
            yield Message("user", _text(list(group)))


def _result(where: str, block: Block) -> Message:
    if block.tool_use_id is None:
        raise RequestError(f"{where}.tool_use_id is missing; say whose result this is", f"{where}.tool_use_id")
    if isinstance(block.content, list):
        parts = [Block("text", UNSEEN) if part.type in IMAGES else part for part in block.content]
        text = _text([(f"{where}.content[{i}]", part) for i, part in enumerate(parts)])
    else:
        text = block.content or ""
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=block.tool_use_id)


def _assistant(blocks: list[Placed]) -> Iterator[Message]:
    """Redacted thinking is another server's and tells this model nothing."""
    texts, calls, thoughts = list[Placed](), list[ToolCall](), list[str]()
    for where, block in blocks:
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                calls.append(_call(where, block))
            case "redacted_thinking":
                pass
            case _:
                texts.append((where, block))
    reasoning = _BETWEEN.join(filter(None, thoughts)) or None
    yield Message("assistant", _text(texts), reasoning=reasoning, tool_calls=tuple(calls))


def _call(where: str, block: Block) -> ToolCall:
    for name in ("id", "name"):
        if not getattr(block, name):
            raise RequestError(f"{where}.{name} is missing", f"{where}.{name}")
    return ToolCall(block.id or "", block.name or "", block.input or {})


def _text(blocks: Sequence[Placed]) -> str:
    """Raises ApiError 400 for what is no text."""
    for where, block in blocks:
        if block.type != "text":
            text = f"{where}.type: only text is served here, not {block.type[:40]!r}"
            raise ApiError(400, text, param=f"{where}.type", code="not_available")
        if block.text is None:
            raise RequestError(f"{where}.text is missing", f"{where}.text")
    return _BETWEEN.join(block.text for _, block in blocks if block.text)
