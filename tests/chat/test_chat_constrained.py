"""Calls that must be made, in every format: a model of random logits makes them, and its parser reads them."""

from __future__ import annotations

import json
from collections.abc import Callable

import jsonschema_rs
import msgspec
import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from fake_model import run, text
from random_engine import engine, request
from tandem.engine.grammar import sources
from tandem.engine.protocol import Grammar
from tandem.errors import RequestError
from tandem.server.chat.answer_parser import AnswerRules, FormattedText
from tandem.server.chat.collect import whole_answer
from tandem.server.chat.constraint import Speech, constraint
from tandem.server.chat.conversation import Conversation, Tool, ToolChoice
from tandem.server.chat.formats.reasoning_format import reasoning_format
from tandem.server.chat.formats.tool_format import ToolFormat, tool_format, tool_formats
from tandem.server.chat.held_tools import held_tools

COLOURS = Tool(
    "paint",
    None,
    {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "blue"]},
            "layers": {"type": "integer", "minimum": 1, "maximum": 9},
            "dry": {"type": "boolean"},
        },
        "required": ["colour", "layers", "dry"],
        "additionalProperties": False,
    },
    strict=True,
)
NOW = Tool("now", None, {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
TOOLS = {tool.name: tool for tool in (COLOURS, NOW)}
FORMS = [(one, written) for one in tool_formats() for written in one.written]


@pytest.fixture(scope="module")
def model():
    return engine()


def speech(one: ToolFormat | None, written=None, reasoning=None, in_reasoning=False) -> Speech:
    return Speech(one, written, reasoning, in_reasoning)


def asked(mode: str, **other) -> Conversation:
    choice = ToolChoice(mode, "paint" if mode == "named" else None)
    return Conversation((), (COLOURS, NOW), choice, **other)


def calls_in(one: ToolFormat, answer: str) -> list[tuple[str, dict]]:
    parser = FormattedText(AnswerRules(one, None, TOOLS))
    read = whole_answer([*parser.push(answer), *parser.end("stop")])
    return [(call.name, json.loads(call.arguments)) for call in read.calls]


@pytest.mark.parametrize(("one", "written"), FORMS, ids=lambda x: getattr(x, "name", getattr(x, "begin", "")))
@pytest.mark.parametrize("mode", ["required", "named"])
def test_calls_of_random_logits_are_read(model, one, written, mode) -> None:
    form = msgspec.structs.replace(one, written=(written,))
    grammar = constraint(asked(mode, parallel_tool_calls=False), speech(form, written), None)
    outputs = run(model, *[request(str(i), grammar, seed=i) for i in range(4)])
    for each in outputs.values():
        assert each[-1].finish_reason == "stop", text(each)
        [(name, arguments)] = calls_in(form, text(each))
        assert jsonschema_rs.is_valid(TOOLS[name].parameters, arguments), text(each)
        assert mode == "required" or name == "paint"


def test_calls_or_a_content(model) -> None:
    """Both may be asked for: agents have tools, and say what the last answer must be."""
    one = tool_format("hermes")
    content = sources.json_schema({"type": "object", "properties": {"done": {"const": 1}}, "required": ["done"]})
    grammar = constraint(asked("auto"), speech(one, one.written[0]), content)
    outputs = run(model, *[request(str(i), grammar, seed=i) for i in range(24)])
    answers = [text(each) for each in outputs.values()]
    contents = [answer for answer in answers if not calls_in(one, answer)]
    assert 0 < len(contents) < len(answers)
    assert all(json.loads(answer) == {"done": 1} for answer in contents)
    required = constraint(asked("required"), speech(one, one.written[0]), content)
    assert "done" not in required.text


def test_reasoning_before_a_content() -> None:
    hermes, harmony, digits = tool_format("hermes"), tool_format("gpt-oss"), Grammar("regex", "[0-9]{4}")
    qwen, channel = reasoning_format("qwen3"), reasoning_format("gpt-oss")
    cases = [
        (speech(hermes, None, qwen), ["1234", "<think>Hm 12</think>\n\n1234"], ["Hm</think>1234", "<think>1234"]),
        (speech(hermes, None, qwen, in_reasoning=True), ["Hm</think>\n1234"], ["1234", "</think>12345"]),
        (speech(None, None, qwen), ["<think>\n</think>1234"], ["<think></think>a"]),
        (
            speech(harmony, None, channel),
            [f"{THOUGHT}<|channel|>final<|message|>1234", "<|channel|>final<|message|>1234"],
            ["1234", f"{THOUGHT}1234", "<|channel|>final<|message|>x"],
        ),
    ]
    for said, good, bad in cases:
        for given in (digits, sources.json_schema({"type": "integer"}), Grammar("ebnf", "root ::= [0-9]{4}")):
            accepts = accepted_by(constraint(Conversation(()), said, given))
            assert all(accepts(text) for text in good)
            assert given.kind == "json_schema" or not any(accepts(text) for text in bad)
    never = Speech(None, None, qwen, in_reasoning=False, may_reason=False)
    assert constraint(Conversation(()), never, digits) is digits


THOUGHT = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"


def accepted_by(grammar: Grammar) -> Callable[[str], bool]:
    made = xgrammar.Grammar.from_structural_tag(grammar.text)
    return lambda said: _is_grammar_accept_string(made, said)


def test_what_cannot_be_promised_is_refused() -> None:
    one = tool_format("hermes")
    unknown, digits = speech(one, None), Grammar("regex", "[0-9]")
    for mode in ("required", "named"):
        with pytest.raises(RequestError) as refused:
            constraint(asked(mode), unknown, None)
        assert refused.value.param == "tool_choice"
    with pytest.raises(RequestError) as refused:
        constraint(asked("auto"), unknown, digits)
    assert refused.value.param == "tools"
    assert constraint(asked("auto"), unknown, None) is None
    odd = Tool("odd", None, {"type": "array", "uniqueItems": True}, strict=True)
    with pytest.raises(RequestError, match="'odd'.*uniqueItems"):
        constraint(Conversation((), (odd,), ToolChoice("auto")), speech(one, one.written[0]), None)
    held, unheld = held_tools(Conversation((), (odd,), ToolChoice("auto")))
    assert unheld == ("tools.uniqueItems",)
    assert constraint(held, speech(one, one.written[0]), None) is not None
    lax = msgspec.structs.replace(tool_format("hermes"))
    tools = (Tool("odd", None, odd.parameters), NOW)
    assert constraint(Conversation((), tools, ToolChoice("required")), speech(lax, lax.written[0]), None).lenient
