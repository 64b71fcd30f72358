"""`write_call`: a call as its format wants it, for histories and descriptions that no template writes."""

from __future__ import annotations

import json
from typing import Any

from tandem.server.chat.formats.tool_format import Pairs, Parameters, ToolFormat


def write_calls(tool_format: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls of one answer: (name, arguments)."""
    if tool_format.python:
        return f"[{', '.join(_python(name, arguments) for name, arguments in calls)}]"
    first, last = (tool_format.section_open or ("",))[-1], (tool_format.section_close or ("",))[-1]
    written = tool_format.written[0] if tool_format.written else None
    if written:
        first, last = written.first, written.last
    each = [_one(tool_format, index, name, arguments) for index, (name, arguments) in enumerate(calls)]
    return first + (written.separator if written else "").join(each) + last


def _one(tool_format: ToolFormat, index: int, name: str, arguments: dict[str, Any]) -> str:
    if tool_format.pairs:
        return f"{tool_format.open[0]}{name}{_map(arguments, tool_format.pairs)}{tool_format.close[0]}"
    written = tool_format.written[0]
    syntax = tool_format.parameters
    body = _json(arguments) if syntax is None else _parameters(syntax, arguments)
    return f"{written.begun(name, index, f'call{index:05}')}{body}{written.end}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parameters(syntax: Parameters, arguments: dict[str, Any]) -> str:
    break_ = "\n" if syntax.trim else ""
    ends = {kind: end for end, kind in syntax.key_end.items()}
    written = []
    for key, value in arguments.items():
        end = ends.get("string" if isinstance(value, str) else "json", ends["schema"])
        text = value if isinstance(value, str) else _json(value)
        written.append(f"{syntax.open}{key}{end}{syntax.value_open}{break_}{text}{break_}{syntax.close}")
    return "\n".join(written)


def _map(value: dict[str, Any], syntax: Pairs) -> str:
    return "{" + ",".join(f"{key}:{_pair_value(one, syntax)}" for key, one in value.items()) + "}"


def _pair_value(value: Any, syntax: Pairs) -> str:
    match value:
        case str():
            return f"{syntax.quote}{value}{syntax.quote}"
        case dict():
            return _map(value, syntax)
        case list():
            return f"[{','.join(_pair_value(one, syntax) for one in value)}]"
        case _:
            return _json(value)


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
