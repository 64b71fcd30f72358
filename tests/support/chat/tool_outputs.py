"""Answers of our own in every format: some text, a call of `weather` with awkward values, a call of `now` with none."""

from __future__ import annotations

import json
from typing import Any

from tandem.server.chat.conversation import Tool

WEATHER = Tool(
    "weather",
    "Tells the weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
)
NOW = Tool("now", "Tells the time", {"type": "object", "properties": {}})
TOOLS = {tool.name: tool for tool in (WEATHER, NOW)}

OPENAI_TOOLS = [
    {
        "type": "function",
        "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
    }
    for t in TOOLS.values()
]

CITY = 'Zürich "Nord" {1}\n</x> 😀'
ARGUMENTS: dict[str, Any] = {"city": CITY, "days": 3, "units": ["C", "F"]}
_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)


def _dsml(block: str) -> str:
    return (
        f'Hm.\n\n<｜DSML｜{block}>\n<｜DSML｜invoke name="weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="units" string="false">["C", "F"]</｜DSML｜parameter>\n'
        f'</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{block}>'
    )


# format → an answer that says "Hm." (where text may stand beside calls) and calls weather and now
OUTPUTS: dict[str, str] = {
    "hermes": f'Hm.\n<tool_call>\n{{"name": "weather", "arguments": {_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
    "qwen3_coder": "Hm.\n\n<tool_call>\n<function=weather>\n"
    f"<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=units>\n['C', 'F']\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseekv3": "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv31": f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "glm45": f"Hm.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    '<arg_key>units</arg_key>\n<arg_value>["C", "F"]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
    "kimi_k2": "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax-m2": 'Hm.\n<minimax:tool_call>\n<invoke name="weather">\n'
    f'<parameter name="city">{CITY}</parameter>\n<parameter name="days">3</parameter>\n'
    '<parameter name="units">["C", "F"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
    "</minimax:tool_call>",
    "gpt-oss": "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{_JSON}<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    "llama3": f'{{"name": "weather", "parameters": {_JSON}}}; {{"name": "now", "parameters": {{}}}}',
    "pythonic": f"[weather(city={CITY!r}, days=3, units=['C', 'F']), now()]",
    "mistral": f"Hm.[TOOL_CALLS]weather[ARGS]{_JSON}[TOOL_CALLS]now[ARGS]{{}}",
    "gemma4": f'Hm.<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:3,units:[<|"|>C<|"|>,<|"|>F<|"|>]}}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "functiongemma": f"Hm.<start_function_call>call:weather{{city:<escape>{CITY}<escape>,days:3,"
    "units:[<escape>C<escape>,<escape>F<escape>]}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
}
WITHOUT_TEXT = {"llama3", "pythonic"}  # their calls are whole answers

# Other ways in which models write the same calls: format, answer.
VARIANTS: dict[str, tuple[str, str]] = {
    "hermes in one line": (
        "hermes",
        f'<tool_call>{{"name":"weather","arguments":{json.dumps(_JSON)}}}</tool_call>'
        '<tool_call>{"name":"now"}</tool_call>',
    ),
    "qwen3_coder without line breaks": (
        "qwen3_coder",
        f"<tool_call><function=weather><parameter=city>{CITY}</parameter><parameter=days>3</parameter>"
        '<parameter=units>["C", "F"]</parameter></function></tool_call><function=now></function>',
    ),
    "glm47": (
        "glm45",
        f"<tool_call>weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value><arg_key>days</arg_key>"
        '<arg_value>3</arg_value><arg_key>units</arg_key><arg_value>["C", "F"]</arg_value></tool_call>'
        "<tool_call>now</tool_call>",
    ),
    "mistral's list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_JSON}, "id": "abcdefghi"}}, '
        '{"name": "now", "arguments": {}, "id": "123456789"}]',
    ),
    "mistral with ids": (
        "mistral",
        f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{_JSON}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}",
    ),
    "llama3 behind its tag": (
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {_JSON}}}; '
        '{"type": "function", "name": "now", "parameters": {}}',
    ),
    "pythonic between its tags": (
        "pythonic",
        f"<|python_start|>[weather(city={CITY!r}, days=3, units=['C', 'F']), now()]<|python_end|>",
    ),
    "deepseekv3 with one name line": (
        "deepseekv3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather```json\n"
        f"{_JSON}```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜>",
    ),
    "kimi_k2 without a section": (
        "kimi_k2",
        f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_JSON}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
}
