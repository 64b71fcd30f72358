"""`Offer`: a request's tools as the model knows them, and as its client does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.errors import RequestError
from tandem.server.chat.conversation import Tool
from tandem.server.errors import ApiError
from tandem.server.limits import MAX_TOOLS
from tandem.server.responses.schema import ResponsesRequest, ToolBody

# OpenAI runs these itself. Agents name them to every model, and the model need not use them: it is not told of them.
_LEFT_OUT = ("web_search", "image_generation", "tool_search")
_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """A tool. `name`, `namespace`: the client's. `custom`: its input is a text; the model gives it as an argument."""

    tool: Tool
    name: str
    namespace: str | None = None
    custom: bool = False


Offer = dict[str, OfferedTools]  # by the model's names


def joined_name(namespace: str | None, name: str) -> str:
    """The model's name of a tool: chat templates have no namespaces."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def offer_of(body: ResponsesRequest) -> Offer:
    """Raises RequestError, ApiError 400."""
    offer: Offer = {}
    for where, offered in _each(body.tools or (), "tools", None):
        name = offered.tool.name
        if name in offer:
            raise RequestError(f"{where}: there are two functions {name!r}", f"{where}.name")
        offer[name] = offered
        if len(offer) > MAX_TOOLS:
            raise RequestError(f"tools: at most {MAX_TOOLS} functions", "tools")
    return offer


def left_out(body: ResponsesRequest) -> list[str]:
    """Names of what the model is not told of, or is not held to."""
    names = []
    for i, tool in enumerate(body.tools or ()):
        if _is_left_out(tool):
            names.append(f"tools[{i}]")
        names += [f"tools[{i}]{place}" for place in _wished_formats(tool)]
    return names


def text_input(arguments: str) -> str:
    """Input text of a custom tool's call. A model may have called it in another way; then all that it wrote."""
    value = json.loads(arguments)
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


def _is_left_out(tool: ToolBody) -> bool:
    """Some have versions: "web_search_preview", "web_search_2025_08_26"."""
    return any(tool.type == name or tool.type.startswith(f"{name}_") for name in _LEFT_OUT)


def _wished_formats(tool: ToolBody) -> list[str]:
    if tool.type == "namespace":
        return [f".tools[{i}].format" for i, inner in enumerate(tool.tools or ()) if _syntax(inner)]
    return [".format"] if _syntax(tool) else []


def _syntax(tool: ToolBody) -> str | None:
    return tool.format.syntax if tool.type == "custom" and tool.format is not None else None


def _each(tools: Any, path: str, namespace: ToolBody | None) -> Iterator[tuple[str, OfferedTools]]:
    for i, tool in enumerate(tools):
        where = f"{path}[{i}]"
        if tool.type == "namespace" and namespace is None:
            _check_name(tool, where)
            yield from _each(tool.tools or (), f"{where}.tools", tool)
        elif tool.type in ("function", "custom"):
            _check_name(tool, where)
            yield where, _offered(tool, namespace, where, first=i == 0)
        elif not _is_left_out(tool):
            text = f"{where}.type: only functions and custom tools are served, not {tool.type[:40]!r}"
            raise ApiError(400, text, param=f"{where}.type", code="not_available")


def _check_name(tool: ToolBody, where: str) -> None:
    if tool.name is None:
        raise RequestError(f"{where}.name is missing", f"{where}.name")


def _offered(tool: ToolBody, namespace: ToolBody | None, where: str, first: bool) -> OfferedTools:
    """Tool as it is offered to the model. A namespace's description stands before its first tool's description."""
    space = namespace.name if namespace else None
    texts = [namespace.description if namespace and first else None, tool.description]
    custom, name = tool.type == "custom", tool.name or ""
    if custom:
        texts.append(_format_text(tool))
    description = "\n\n".join(filter(None, texts)) or None
    parameters = _INPUT if custom else tool.parameters
    strict = bool(tool.strict) and not custom
    known = Tool(joined_name(space, name), description, parameters, strict, f"{where}.parameters")
    return OfferedTools(known, name, space, custom)


def _format_text(tool: ToolBody) -> str | None:
    """The model is asked to keep to a grammar, and not held to it: xgrammar reads none of theirs."""
    if not _syntax(tool) or tool.format is None:
        return None
    return f"`input` must match this {tool.format.syntax} grammar:\n{tool.format.definition or ''}"
