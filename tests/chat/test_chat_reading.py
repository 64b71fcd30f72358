"""Answers in every format become the same calls however they are cut, and nothing of them is lost."""

from __future__ import annotations

import json
import logging
import random

import pytest

from tandem.server.chat.answer_parser import AnswerRules, FormattedText, Markup
from tandem.server.chat.collect import ChatAnswer, whole_answer
from tandem.server.chat.events import (
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from tandem.server.chat.formats.reasoning_format import reasoning_format
from tandem.server.chat.formats.tool_format import tool_format, tool_formats
from tandem.server.chat.reading.calls import short_id
from tandem.text.reasoning_format import reasoning_formats
from tool_outputs import ARGUMENTS, OUTPUTS, TOOLS, VARIANTS, WITHOUT_TEXT


def rules(name: str | None, reasoning: str | None = None, **other) -> AnswerRules:
    if name == "gpt-oss" and reasoning is None:
        reasoning = "gpt-oss"
    return AnswerRules(
        tool_format(name) if name else None,
        reasoning_format(reasoning) if reasoning else None,
        TOOLS if name else {},
        **other,
    )


def events(how: AnswerRules, pieces, reason: str = "stop", markup: bool = False) -> list:
    parser = FormattedText(how, markup)
    found = [event for piece in pieces for event in parser.push(piece)]
    return found + parser.end(reason)


def read(how: AnswerRules, text: str, reason: str = "stop") -> ChatAnswer:
    return whole_answer(events(how, [text], reason))


def said(answer: ChatAnswer) -> tuple:
    """Without ids, which are new every time."""
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.text, answer.reasoning, calls, answer.finish_reason


def everything(found: list) -> str:
    """What the events stand for."""
    texts = {TextDelta: "text", ReasoningDelta: "text", Markup: "text", ToolCallEnd: "raw"}
    return "".join(getattr(event, texts[type(event)]) for event in found if type(event) in texts)


def check_both_calls(answer: ChatAnswer) -> None:
    assert [call.name for call in answer.calls] == ["weather", "now"]
    assert [json.loads(call.arguments) for call in answer.calls] == [ARGUMENTS, {}]
    assert answer.finish_reason == "tool_calls"


def test_every_format_has_an_answer_here():
    assert {one.name for one in tool_formats()} == set(OUTPUTS)


@pytest.mark.parametrize("name", OUTPUTS)
def test_calls_are_read(name):
    answer = read(rules(name), OUTPUTS[name])
    check_both_calls(answer)
    assert answer.text == ("" if name in WITHOUT_TEXT else "Hm.") and not answer.reasoning
    assert len({call.id for call in answer.calls}) == 2


@pytest.mark.parametrize("name", VARIANTS)
def test_other_ways_to_write_them_are_read(name):
    which, text = VARIANTS[name]
    answer = read(rules(which), text)
    check_both_calls(answer)
    assert answer.text == ""


ALL = {name: (name, text) for name, text in OUTPUTS.items()} | VARIANTS


@pytest.mark.parametrize("name", ALL)
def test_cut_at_every_character_the_calls_are_the_same(name):
    which, text = ALL[name]
    how = rules(which)
    whole = said(read(how, text))
    for at in range(len(text) + 1):
        assert said(whole_answer(events(how, [text[:at], text[at:]]))) == whole, at
    letters = events(how, text, markup=True)
    assert said(whole_answer(letters)) == whole
    assert everything(letters) == text


@pytest.mark.parametrize("name", OUTPUTS)
def test_streamed_calls_have_openais_order(name):
    open_call, seen = None, []
    for event in events(rules(name), OUTPUTS[name]):
        match event:
            case ToolCallStart(index, call_id, _):
                assert open_call is None and index == len(seen) and call_id
                open_call = index
                seen.append("")
            case ToolCallArguments(index, fragment):
                assert index == open_call and fragment
                seen[index] += fragment
            case ToolCallEnd(index, "complete", _):
                assert index == open_call
                open_call = None
    assert open_call is None and [json.loads(text) for text in seen] == [ARGUMENTS, {}]


@pytest.mark.parametrize("name", sorted(set(OUTPUTS) - {"pythonic"}))
def test_arguments_come_before_the_call_has_ended(name):
    """A client that waits for a long argument sees that something happens."""
    text = OUTPUTS[name]
    parser = FormattedText(rules(name))
    early = parser.push(text[: text.index("units")])
    assert any(isinstance(event, ToolCallStart) for event in early)
    assert "Zürich" in "".join(e.fragment for e in early if isinstance(e, ToolCallArguments))


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_answer_may_end_anywhere(name):
    """Cut by max_tokens: what has come is there, and nothing is invented."""
    text, how = OUTPUTS[name], rules(name)
    for at in range(len(text)):
        found = events(how, [text[:at]], "length", markup=True)
        assert everything(found) == text[:at]
        answer = whole_answer(found)
        assert answer.finish_reason == "length"
        for call, right in zip(answer.calls, [ARGUMENTS, {}], strict=False):
            complete = json.dumps(right, ensure_ascii=False)
            assert complete.startswith(call.arguments) or json.loads(call.arguments) == right


@pytest.mark.parametrize("name", OUTPUTS)
def test_calls_of_unknown_tools_are_text(name):
    text = OUTPUTS[name].replace("weather", "wether")
    answer = read(rules(name), text)
    assert "wether" in answer.text and "Zürich" in answer.text
    assert [call.name for call in answer.calls] in ([], ["now"])


MALFORMED = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>',
    "hermes without a name": '<tool_call>\n{"arguments": {"city": "x"}}\n</tool_call>',
    "hermes with a list": '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
    "hermes as XML": "<tool_call>\n<weather>\n</tool_call>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_call_begin|>weather<|tool_call_argument_begin|>nothing<|tool_call_end|>",
    "qwen3_coder": "<tool_call>\n<function=weather>\nZürich\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>Zürich</tool_call>",
    "minimax-m2": '<invoke name="weather">Zürich</invoke>',
    "gpt-oss": "<|channel|>commentary to=functions.weather <|message|>Zürich",
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": Zürich}',
    "gemma4": "<|tool_call>call:weather{city}<tool_call|>",
    "pythonic": "[weather('Zürich')]",
    "llama3": '{"name": "weather", "parameters": {"city" "Zürich"}}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_are_text(name):
    text = MALFORMED[name]
    answer = read(rules(name.split()[0]), text)
    assert not answer.calls and answer.finish_reason == "stop"
    assert answer.text.split() == text.split()  # all of it, but for white space


def test_what_comes_behind_a_malformed_call_is_read():
    good = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    answer = read(rules("hermes"), MALFORMED["hermes"] + "\n" + good)
    assert [call.name for call in answer.calls] == ["now"] and "weather" in answer.text


def test_json_that_is_no_call_is_text():
    for text in (
        '{"name": "Bob", "age": 3}',
        '{"city": "x"}',
        "[1, 2]",
        "[weather]",
        "{",
        "[TOOL",
        '{"name": 3}',
    ):
        for name in ("llama3", "pythonic", "mistral", "hermes"):
            assert said(read(rules(name), text)) == (text, "", [], "stop")


def test_only_one_call_where_more_are_not_wanted():
    answer = read(rules("hermes", parallel=False), OUTPUTS["hermes"])
    assert [call.name for call in answer.calls] == ["weather"] and answer.text == "Hm."


def test_ids_are_of_the_format():
    kimi = read(rules("kimi_k2"), OUTPUTS["kimi_k2"])
    assert [call.id for call in kimi.calls] == ["functions.weather:0", "functions.now:1"]
    mistral = read(rules("mistral"), VARIANTS["mistral with ids"][1])
    assert [call.id for call in mistral.calls] == ["abcdefghi", "123456789"]
    assert len(short_id("call_1")) == 9 and short_id("call_1") == short_id("call_1") != short_id("call_2")
    assert short_id("aB3456789") == "aB3456789"


# --- values of formats without quotes

VALUES = [
    ({"type": "string"}, "3", "3"),
    ({"type": "string"}, "null", "null"),
    ({"type": "integer"}, "3", 3),
    ({"type": "integer"}, "three", "three"),
    ({"type": "number"}, "0.5", 0.5),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "none", "none"),
    ({"type": "object"}, "{'a': None}", {"a": None}),
    ({"type": "array"}, "[1, 2", "[1, 2"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7),
    ({"$ref": "#/$defs/n"}, "7", 7),
    ({"$ref": "#/$defs/loop"}, "x", "x"),
    ({"enum": ["a", "b"]}, "7", "7"),
    ({"enum": [7, 8]}, "7", 7),
    ({}, "[1]", [1]),
    ({}, '"x"', '"x"'),
    ({}, "x", "x"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_values_are_what_the_schema_says(schema, text, value):
    from tandem.server.chat.conversation import Tool

    defs = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    tool = Tool("t", None, {"type": "object", "properties": {"k": schema}, "$defs": defs})
    how = AnswerRules(tool_format("qwen3_coder"), None, {"t": tool})
    answer = read(how, f"<function=t>\n<parameter=k>\n{text}\n</parameter>\n</function>")
    got = json.loads(answer.calls[0].arguments)
    assert got == {"k": value} and type(got["k"]) is type(value)


# --- reasoning

THOUGHTS = {
    "qwen3": "<think>\nHm, hm.\n</think>\n\nYes.",
    "deepseek-r1": "Hm, hm.\n</think>\n\nYes.",
    "kimi": "◁think▷Hm, hm.◁/think▷Yes.",
    "mistral": "[THINK]Hm, hm.[/THINK]Yes.",
    "gemma4": "<|channel>thought\nHm, hm.\n<channel|>Yes.",
    "minimax-m3": "<mm:think>Hm, hm.</mm:think>Yes.",
    "seed_oss": "<seed:think>Hm, hm.</seed:think>Yes.",
    "gpt-oss": "<|channel|>analysis<|message|>Hm, hm.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
}


@pytest.mark.parametrize("one", reasoning_formats(), ids=lambda one: one.name)
def test_reasoning_is_split_off(one):
    text = THOUGHTS[one.name]
    tools = tool_format("gpt-oss") if one.channels else None
    how = AnswerRules(tools, one, in_reasoning=one.assume_open)
    for pieces in ([text], list(text)):
        found = events(how, pieces, markup=True)
        assert said(whole_answer(found)) == ("Yes.", "Hm, hm.", [], "stop")
        assert everything(found) == text
    opened = AnswerRules(tools, one, in_reasoning=True)
    if not one.channels:
        for start in (*one.open, ""):
            assert said(read(opened, text.removeprefix(start)))[:2] == ("Yes.", "Hm, hm.")


@pytest.mark.parametrize("name", sorted(set(OUTPUTS) - {"gpt-oss"}))
def test_calls_behind_reasoning(name):
    text = f"<think>\nHm, hm.\n</think>\n\n{OUTPUTS[name]}"
    for pieces in ([text], list(text)):
        answer = whole_answer(events(rules(name, "qwen3"), pieces))
        check_both_calls(answer)
        assert answer.reasoning == "Hm, hm."


def test_a_call_ends_reasoning_that_was_not_closed():
    answer = read(rules("hermes", "qwen3", in_reasoning=True), OUTPUTS["hermes"])
    check_both_calls(answer)
    assert answer.reasoning == "Hm." and answer.text == ""


def test_half_an_end_marker_is_shown_to_nobody():
    """`max_tokens` ended between the call and the end of its marker: clients showed "</tool_call"."""
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n'
    for half in ("</tool_call>"[:end] for end in range(1, 12)):
        answer = read(rules("hermes"), call + half, "length")
        assert (answer.text, [c.name for c in answer.calls], answer.finish_reason) == ("", ["now"], "length")
    assert read(rules("hermes"), call + "</tool", "stop").text == "</tool"  # the model's own words
    assert read(rules("hermes"), call + "</thing", "length").text == "</thing"


def test_reasoning_that_is_cut_is_reasoning():
    answer = read(rules(None, "qwen3"), "<think>Hm, h", "length")
    assert said(answer) == ("", "Hm, h", [], "length")


def test_a_marker_in_the_text_is_text():
    text = "Write <think> and </think> around it."
    assert said(read(rules(None, "qwen3"), text))[:2] == (text, "")


def test_reasoning_that_is_not_streamed_comes_at_once():
    found = events(rules(None, "qwen3", stream_reasoning=False), "<think>Hm, hm.</think>Yes.")
    assert [e for e in found if isinstance(e, ReasoningDelta)] == [ReasoningDelta("Hm, hm.")]
    assert found[0] == ReasoningDelta("Hm, hm.") and found[-1] == Finish("stop")


# --- fuzz


def pieces_of(name: str) -> list[str]:
    one = tool_format(name)
    return [
        *sorted(one.markers()), *one.at_start, "<think>", "</think>", "weather", "now", "city", "days", "units",
        '"', "{", "}", "[", "]", ":", ",", "(", ")", "=", "\\", "\n", " ", "3", "true", "x", "é😀", "'",
        "\\ud83d", "\\ude00", "\\u00e9",
        '{"name": "weather", "arguments": ', '"city"', '"arguments"', '"name"', '{"city": "x"}', "functions.",
        OUTPUTS[name],
    ]  # fmt: skip


def fuzz(name: str, count: int, caplog) -> None:
    rng, pieces = random.Random(name), pieces_of(name)
    for number in range(count):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 14)))
        if number % 3 == 0:  # a good answer, damaged
            good, at = OUTPUTS[name], rng.randrange(len(OUTPUTS[name]))
            text = good[:at] + rng.choice(pieces) + good[at + rng.randint(0, 9) :]
        how = rules(name, rng.choice((None, "qwen3")), in_reasoning=rng.random() < 0.2)
        reason = rng.choice(("stop", "length"))
        letters = events(how, text, reason, markup=True)
        assert everything(letters) == text
        assert all(map(sayable, letters)), text
        whole = whole_answer(events(how, [text], reason))
        assert said(whole_answer(letters)) == said(whole), text
        for event in letters:
            if isinstance(event, ToolCallEnd) and event.outcome == "complete":
                call = next(c for i, c in enumerate(started(letters)) if i == event.index)
                assert isinstance(json.loads(call), dict), text
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def sayable(event: object) -> bool:
    """UTF-8 can say all its texts: it has no half of a character."""
    texts = [value for name in event.__dataclass_fields__ if isinstance(value := getattr(event, name), str)]
    return all(text.encode() is not None for text in texts)


def started(found: list) -> list[str]:
    calls: list[str] = []
    for event in found:
        if isinstance(event, ToolCallStart):
            calls.append("")
        if isinstance(event, ToolCallArguments):
            calls[event.index] += event.fragment
    return calls


@pytest.mark.parametrize("name", OUTPUTS)
def test_fuzzed_answers(name, caplog):
    fuzz(name, 100, caplog)


@pytest.mark.full
@pytest.mark.parametrize("name", OUTPUTS)
def test_many_fuzzed_answers(name, caplog):
    fuzz(name, 10_000, caplog)
