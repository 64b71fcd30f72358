"""`conversation_of`: what a body of /v1/messages asks for. Every complaint names the field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tandem.errors import RequestError
from tandem.server.anthropic.blocks import BETWEEN, PlacedBlock, content_of
from tandem.server.anthropic.schema import ContentBlock, CountRequest, MessageBody, ToolBody
from tandem.server.chat.attachments import Sight, refused_turn
from tandem.server.chat.content import Content, joined, text_of
from tandem.server.chat.conversation import Conversation, Message, Tool, ToolCall, ToolChoice, is_begun
from tandem.server.errors import ApiError

_BILLING = "x-anthropic-billing-header:"  # what a system block of Claude Code's begins with that no model is to read
# Anthropic runs these itself. Agents name them to every model, and the model need not use them: it is not told of them.
_LEFT_OUT = ("web_search_", "web_fetch_", "tool_search_")
_OTHERS = ("server_tool_use", "mcp_tool_use")  # calls that another server ran


def conversation_of(body: CountRequest, sight: Sight) -> Conversation:
    """Raises RequestError, ApiError 400."""
    served = [(i, tool) for i, tool in enumerate(body.tools or ()) if not _is_left_out(tool)]
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in served)
    system = _system(body, sight.of_turn(refused=True))
    messages = [*system, *_turns(body, sight)]
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


def _system(body: CountRequest, sight: Sight) -> list[Message]:
    if not body.system:
        return []
    if isinstance(body.system, str):
        return [Message("system", body.system)]
    blocks = [PlacedBlock(f"system[{i}]", block, sight) for i, block in enumerate(body.system)]
    # It differs from one conversation to the next, at the very beginning: no prompt would be found in the prefix cache.
    instructions = [placed for placed in blocks if not (placed.block.text or "").startswith(_BILLING)]
    return [Message("system", content_of(instructions))] if instructions else []


def left_out(body: CountRequest) -> list[str]:
    """Names of the tools that the model is not told of."""
    return [f"tools[{i}]" for i, tool in enumerate(body.tools or ()) if _is_left_out(tool)]


def _is_left_out(tool: ToolBody) -> bool:
    """Each has versions: "web_search_20250305"."""
    return (tool.type or "").startswith(_LEFT_OUT)


def _tool(tool: ToolBody, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        text = f"{where}.type: only tools of your own are served, not {tool.type[:40]!r}"
        raise ApiError(400, text, param=f"{where}.type", code="not_available")
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is missing", f"{where}.input_schema")
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), f"{where}.input_schema")


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


def _turns(body: CountRequest, sight: Sight) -> Iterator[Message]:
    """Consecutive turns of one role are one turn."""
    refused = refused_turn([_role(each) for each in body.messages], body.tools)
    numbered = enumerate(body.messages)
    for role, several in groupby(numbered, key=lambda each: each[1].role):
        lists = [_blocks(each, f"messages[{i}]", sight.of_turn(i == refused)) for i, each in several]
        blocks = [block for each in lists for block in each]
        if role == "system":
            yield Message("system", content_of(blocks))
        else:
            yield from _assistant(blocks) if role == "assistant" else _user(blocks, sight)


def _role(body: MessageBody) -> str:
    """A user's turn with results is the tools'."""
    results = isinstance(body.content, list) and any(block.type == "tool_result" for block in body.content)
    return "tool" if results else body.role


def _blocks(body: MessageBody, where: str, sight: Sight) -> list[PlacedBlock]:
    if isinstance(body.content, str):
        return [PlacedBlock(f"{where}.content", ContentBlock("text", body.content), sight)]
    return [PlacedBlock(f"{where}.content[{i}]", block, sight) for i, block in enumerate(body.content)]


def _user(blocks: list[PlacedBlock], sight: Sight) -> Iterator[Message]:
    """Results of tools are messages of their own."""
    for is_result, group in groupby(blocks, key=lambda placed: placed.block.type == "tool_result"):
        if is_result:
            yield from (_result(placed.where, placed.block, sight) for placed in group)
        else:
            yield Message("user", content_of(group))


def _result(where: str, block: ContentBlock, sight: Sight) -> Message:
    if block.tool_use_id is None:
        raise RequestError(f"{where}.tool_use_id is missing; say whose result this is", f"{where}.tool_use_id")
    content: Content
    if isinstance(block.content, list):
        parts = enumerate(block.content)
        content = content_of(PlacedBlock(f"{where}.content[{i}]", part, sight) for i, part in parts)
    else:
        content = block.content or ""
    if block.is_error and not text_of(content).lower().startswith("error"):
        content = joined(("Error: ", content))
    return Message("tool", content, tool_call_id=block.tool_use_id)


def _assistant(blocks: list[PlacedBlock]) -> Iterator[Message]:
    """Redacted thinking is another server's and tells this model nothing, and so is what that server ran itself."""
    texts, calls, thoughts = list[PlacedBlock](), list[ToolCall](), list[str]()
    for placed in blocks:
        block = placed.block
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                calls.append(_call(placed.where, block))
            case "redacted_thinking":
                pass
            case kind if kind in _OTHERS or kind.endswith("_tool_result"):
                pass
            case _:
                texts.append(placed)
    reasoning = BETWEEN.join(filter(None, thoughts)) or None
    yield Message("assistant", content_of(texts), reasoning=reasoning, tool_calls=tuple(calls))


def _call(where: str, block: ContentBlock) -> ToolCall:
    for name in ("id", "name"):
        if not getattr(block, name):
            raise RequestError(f"{where}.{name} is missing", f"{where}.{name}")
    return ToolCall(block.id or "", block.name or "", block.input or {})
