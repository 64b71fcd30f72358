"""A template is tried when the model is loaded: what it writes must be what the parser reads."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from agent_turns import texts_in
from own_templates import NAMES, PLAIN, own_template
from tandem.server.chat.answer_parser import AnswerRules, FormattedText
from tandem.server.chat.collect import ChatAnswer, whole_answer
from tandem.server.chat.constraint import call_constraint
from tandem.server.chat.conversation import Conversation, Tool, ToolChoice
from tandem.server.chat.formats.reasoning_format import reasoning_format
from tandem.server.chat.formats.tool_format import (
    ToolFormat,
    Written,
    detect_tool_format,
    tool_format,
    tool_formats,
)
from tandem.server.chat.formats.writing import write_calls
from tandem.server.chat.template_fit import Render, fit_template
from tandem.text.chat_template import ChatTemplate
from tool_outputs import ARGUMENTS, NOW, TOOLS, WEATHER

# The source package of llama-cpp-python: `make test-peers` downloads it. Its templates are read where they are.
PEERS = Path(__file__).parents[2] / ".cache" / "peers"


def renderer(source: str, **variables) -> Render:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", **variables})

    def render(messages, add_generation_prompt=True, **values):
        return template.render(messages, add_generation_prompt=add_generation_prompt, **values)

    return render


def read(name: str | ToolFormat, text: str) -> ChatAnswer:
    one = tool_format(name) if isinstance(name, str) else name
    parser = FormattedText(AnswerRules(one, None, TOOLS))
    return whole_answer([*parser.push(text), *parser.end("stop")])


@pytest.mark.parametrize("name", NAMES)
def test_templates_of_our_own_fit(name):
    source = own_template(name)
    assert detect_tool_format(source) == tool_format(name)
    fit = fit_template(renderer(source), tool_format(name))
    assert fit.tools and fit.reads_back
    assert fit.arguments == "object" and fit.empty == ""
    assert fit.several == (name != "gpt-oss")
    assert fit.reasoning == ("thinking" if name == "gpt-oss" else "reasoning_content")
    assert (fit.written is None) == (name == "gemma4")


def test_arguments_as_text_and_content_as_null():
    source = own_template("kimi_k2")
    as_text = source.replace("{{ call.function.arguments | tojson }}", "{{ call.function.arguments + '' }}")
    fit = fit_template(renderer(as_text), tool_format("kimi_k2"))
    assert fit.reads_back and fit.arguments == "text" and fit.empty == ""
    as_null = source.replace(
        "{%- if message.tool_calls %}", "{%- if message.tool_calls and message.content is none %}"
    )
    fit = fit_template(renderer(as_null), tool_format("kimi_k2"))
    assert fit.reads_back and fit.arguments == "object" and fit.empty is None


def test_a_template_that_writes_something_else_does_not_fit():
    source = own_template("hermes").replace("arguments | tojson", "arguments | tojson | upper")
    fit = fit_template(renderer(source), tool_format("hermes"))
    assert fit.tools and not fit.reads_back and fit.written is None


def test_an_exact_form_is_wanted_before_calls_are_constrained():
    """Read back it is; but a grammar of ours would make the model say what it never says."""
    source = own_template("hermes").replace('\', "arguments": \'', '\',  "arguments":  \'').replace(
        '"name": ', '"name" : '
    )  # fmt: skip
    fit = fit_template(renderer(source), tool_format("hermes"))
    assert fit.reads_back and fit.written is None


def test_templates_without_tools():
    fit = fit_template(renderer(PLAIN), tool_format("hermes"))
    assert not fit.tools and not fit.reads_back
    assert detect_tool_format(PLAIN) is None


@pytest.mark.parametrize("one", tool_formats(), ids=lambda one: one.name)
def test_what_is_written_is_read(one):
    for written in one.written or (None,):
        form = one if written is None else msgspec.structs.replace(one, written=(written,))
        answer = read(form, write_calls(form, [("weather", ARGUMENTS), ("now", {})]))
        assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == [
            ("weather", ARGUMENTS),
            ("now", {}),
        ]
        assert answer.text == ""


# --- constraints

FORMS = [(one, written) for one in tool_formats() for written in one.written]
GOOD = {"city": "Zürich", "days": 3, "units": ["C"]}


def accepts(
    conversation: Conversation, one: ToolFormat, written: Written, **reasoning
) -> Callable[[str], bool]:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    given = {"reasoning": None, "in_reasoning": False} | reasoning
    tag = call_constraint(conversation, one, written, **given)
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
    return lambda text: _is_grammar_accept_string(grammar, text)


def asked(mode: str, strict: bool = False, **other) -> Conversation:
    tools = (Tool("weather", None, WEATHER.parameters, strict), NOW)
    return Conversation((), tools, ToolChoice(mode, "weather" if mode == "named" else None), **other)


@pytest.mark.parametrize(("one", "written"), FORMS, ids=lambda x: getattr(x, "name", getattr(x, "begin", "")))
def test_a_grammar_accepts_calls_and_nothing_else(one, written):
    form = msgspec.structs.replace(one, written=(written,))
    good, other = write_calls(form, [("weather", GOOD)]), write_calls(form, [("now", {})])
    bad = write_calls(form, [("weather", {"days": "many"})])
    two = write_calls(form, [("weather", GOOD), ("now", {})])
    required = accepts(asked("required"), form, written)
    assert required(good) and required(other) and required(two) != written.single
    assert not required("") and not required("Hi") and not required(bad)
    named = accepts(asked("named"), form, written)
    assert named(good) and not named(other) and not named(two)
    alone = accepts(asked("required", parallel_tool_calls=False), form, written)
    assert alone(good) and not alone(two)
    if one.channels is None:
        auto = accepts(asked("auto", strict=True), form, written)
        assert auto("Hi") and auto(good) and auto(two) and not auto(bad)


def test_reasoning_may_come_first():
    one = tool_format("hermes")
    written, call = one.written[0], write_calls(one, [("now", {})])
    thinking = reasoning_format("qwen3")
    begun = accepts(asked("required"), one, written, reasoning=thinking, in_reasoning=True)
    assert begun(f"Hm.\n</think>\n\n{call}") and not begun(call)
    free = accepts(asked("required"), one, written, reasoning=thinking)
    assert free(f"<think>Hm.</think>\n\n{call}") and free(call) and not free(f"Hm.</think>{call}")


def test_channels_may_come_first():
    one, thinking = tool_format("gpt-oss"), reasoning_format("gpt-oss")
    call = write_calls(one, [("now", {})])
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    required = accepts(asked("required"), one, one.written[0], reasoning=thinking)
    assert required(call) and required(thought + call) and not required(thought)
    auto = accepts(asked("auto", strict=True), one, one.written[0], reasoning=thinking)
    assert auto(thought + call) and auto(f"{thought}<|channel|>final<|message|>Yes.") and not auto("Yes.")


# --- other people's templates

PEER_TEMPLATES = {
    "hermes": ["Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-QwQ-32B", "MiMo-VL", "ibm-granite-granite-4.0"],
    "qwen3_coder": ["Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"],
    "deepseekv3": ["llama-cpp-deepseek-r1", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"],
    "deepseekv31": ["deepseek-ai-DeepSeek-V3.1"],
    "deepseekv32": ["deepseek-ai-DeepSeek-V3.2"],
    "deepseekv4": ["deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"],
    "glm45": ["GLM-4.6", "GLM-4.7-Flash"],
    "kimi_k2": ["moonshotai-Kimi-K2"],
    "minimax-m2": ["MiniMax-M2"],
    "gpt-oss": ["openai-gpt-oss-120b"],
    "llama3": ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"],
    "mistral": [
        "mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506",
        "unsloth-mistral-Devstral-Small-2507", "mistralai-Ministral-3-14B-Reasoning-2512",
    ],
    "gemma4": ["google-gemma-4-31B-it"],
}  # fmt: skip


@pytest.fixture(scope="module")
def peer_templates() -> dict[str, str]:
    """By their names. Other versions of the package may have others."""
    found: dict[str, str] = {}
    for package in PEERS.glob("llama_cpp_python-*.tar.gz"):
        with tarfile.open(package) as archive:
            for member in archive:
                path = Path(member.name)
                if path.suffix == ".jinja" and path.parent.name == "templates":
                    file = archive.extractfile(member)
                    found[path.stem] = file.read().decode() if file else ""
    return found


@pytest.mark.parametrize(
    ("name", "template"), [(name, one) for name, templates in PEER_TEMPLATES.items() for one in templates]
)
def test_templates_of_models_fit(name, template, peer_templates):
    if template not in peer_templates:
        pytest.skip(f"{template} is not at hand: make test-peers downloads it")
    source = peer_templates[template]
    assert detect_tool_format(source) == tool_format(name)
    fit = fit_template(renderer(source), tool_format(name))
    assert fit.reads_back
    assert (fit.written is None) == (name == "gemma4")
    assert min(texts_in(renderer(source), fit)) >= 0
