"""Chat templates of our own: turns between `<|turn|>` and `<|done|>`, and calls in every format's own markers."""

from __future__ import annotations

_SKELETON = """
{%- macro write(call) %}CALL{% endmacro -%}
{%- if tools -%}<|turn|>system
You have tools.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}HINT<|done|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}<|turn|>tool
{{ message.content }}<|done|>
{% else -%}<|turn|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}
{%- if message.tool_calls %}FIRST{% for call in message.tool_calls %}{{ write(call) }}{% if not loop.last %}BETWEEN{% endif %}{% endfor %}LAST{% endif %}<|done|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|turn|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif -%}
"""  # noqa: E501

_EACH = "{% for key, value in call.function.arguments.items() %}"
_VALUE = "{{ value if value is string else value | tojson }}"
_JSON = "{{ call.function.arguments | tojson }}"
_NAME = "{{ call.function.name }}"

# format → (one call, before all, between two, after all, what the description of tools hints at)
_PARTS: dict[str, tuple[str, str, str, str, str]] = {
    "hermes": (f'<tool_call>\n{{{{ \'{{"name": "\' }}}}{_NAME}{{{{ \'", "arguments": \' }}}}{_JSON}}}\n</tool_call>',
               "\n", "\n", "", ""),
    "qwen3_coder": (f"<tool_call>\n<function={_NAME}>\n{_EACH}<parameter={{{{ key }}}}>\n{_VALUE}\n</parameter>\n"
                    "{% endfor %}</function>\n</tool_call>", "\n", "\n", "", ""),
    "deepseekv3": (f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n{_JSON}\n```<｜tool▁call▁end｜>",
                   "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>", ""),
    "deepseekv31": (f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>",
                    "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>", ""),
    "glm45": (f"<tool_call>{_NAME}\n{_EACH}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n"
              "{% endfor %}</tool_call>", "\n", "\n", "", ""),
    "kimi_k2": (f"<|tool_call_begin|>{{{{ call.id }}}}<|tool_call_argument_begin|>{_JSON}<|tool_call_end|>",
                "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>", ""),
    "minimax-m2": (f'<invoke name="{_NAME}">\n{_EACH}<parameter name="{{{{ key }}}}">{_VALUE}</parameter>\n'
                   "{% endfor %}</invoke>\n", "\n<minimax:tool_call>\n", "", "</minimax:tool_call>", ""),
    "mistral": (f"[TOOL_CALLS]{_NAME}[ARGS]{_JSON}", "", "", "", ""),
    "llama3": (f'{{{{ \'{{"name": "\' }}}}{_NAME}{{{{ \'", "parameters": \' }}}}{_JSON}}}', "", "; ", "",
               "<|python_tag|>"),
}  # fmt: skip
for _name, _block in (("deepseekv32", "function_calls"), ("deepseekv4", "tool_calls")):
    _PARTS[_name] = (
        f'<｜DSML｜invoke name="{_NAME}">\n{_EACH}<｜DSML｜parameter name="{{{{ key }}}}" '
        "string=\"{{ 'true' if value is string else 'false' }}\">"
        f"{_VALUE}</｜DSML｜parameter>\n{{% endfor %}}</｜DSML｜invoke>\n",
        f"\n\n<｜DSML｜{_block}>\n", "", f"</｜DSML｜{_block}>", "",
    )  # fmt: skip

_GEMMA = (
    '{%- macro said(value) -%}{% if value is string %}<|"|>{{ value }}<|"|>{% elif value is boolean %}'
    "{{ value | tojson }}{% elif value is sequence %}[{% for one in value %}{{ said(one) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ value | tojson }}{% endif %}{%- endmacro -%}"
)
_PARTS["gemma4"] = (
    "<|tool_call>call:" + _NAME + "{{ '{' }}" + _EACH + "{{ key }}:{{ said(value) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>", "", "", "", "",
)  # fmt: skip


def own_template(name: str) -> str:
    """One that describes tools and writes calls as the format `name` wants."""
    if name == "gpt-oss":
        return HARMONY
    call, first, between, last, hint = _PARTS[name]
    text = _SKELETON.replace("CALL", call).replace("FIRST", first).replace("BETWEEN", between)
    text = text.replace("LAST", last).replace("HINT", hint)
    return (_GEMMA if name == "gemma4" else "") + text


NAMES = (*_PARTS, "gpt-oss")

# One call in each message, reasoning under another key, no text beside it.
HARMONY = """
{%- if tools -%}<|start|>developer<|message|># Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|start|>functions.it to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- elif message.tool_calls -%}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
{%- if message.thinking and message.content %}{{ raise_exception('not both') }}{% endif -%}
{%- if message.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{%- endif -%}
<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

# Knows no tools; refuses system messages if it is told to.
PLAIN = """
{%- for message in messages -%}
{%- if message.role == 'system' and no_system %}{{ raise_exception('no system messages') }}{% endif -%}
{%- if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif -%}
<|turn|>{{ message.role }}
{{ message.content }}<|done|>
{% endfor -%}
{%- if add_generation_prompt -%}<|turn|>assistant
{% endif -%}
"""
