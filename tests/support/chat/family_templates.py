"""Chat templates in the forms of eight families, written here: how each frames turns, trims and treats thoughts."""

from __future__ import annotations

CHATML = """
{%- for message in messages -%}
{%- set text = message.content -%}
{%- if message.role == 'assistant' and '</think>' in text -%}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- if loop.last -%}{%- set text = '<think>\\n' + thought + '\\n</think>\\n\\n' + text -%}{%- endif -%}
{%- endif -%}
<|im_start|>{{ message.role }}
{{ text }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

LLAMA3 = """
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

DEEPSEEK = """
{{- '<｜begin▁of▁sentence｜>' -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' -%}
{%- set text = message.content.split('</think>')[-1] if '</think>' in message.content else message.content -%}
{{ '<｜Assistant｜>' + text + '<｜end▁of▁sentence｜>' }}
{%- else -%}{{ message.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}
"""

GLM = """
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|assistant|>
{%- set text, thought = message.content, '' -%}
{%- if '</think>' in text -%}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip() -%}
{%- set text = text.split('</think>')[-1] -%}
{%- endif -%}
{{ '\\n<think>' + thought + '</think>' }}
{%- if text.strip() -%}{{ '\\n' + text.strip() }}{%- endif -%}
{%- else -%}<|{{ message.role }}|>
{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

KIMI = """
{%- for message in messages -%}
<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

HARMONY = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if '<|channel|>' in message.content -%}{{ raise_exception('content has a channel of its own') }}{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

MISTRAL = """
{{- '<s>' -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{ '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' -%}{{ ' ' + message.content | trim + '</s>' }}{%- endif -%}
{%- endfor -%}
"""

GEMMA = """
{{- '<bos>' -}}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

TEMPLATES = {
    "ChatML": CHATML, "Llama 3": LLAMA3, "DeepSeek": DEEPSEEK, "GLM": GLM, "Kimi": KIMI, "gpt-oss": HARMONY,
    "Mistral": MISTRAL, "Gemma": GEMMA,
}  # fmt: skip

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "[gMASK]", "<sop>", "<|user|>",
    "<|assistant|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|start|>", "<|channel|>", "<|message|>",
    "<|end|>", "<|return|>", "<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
