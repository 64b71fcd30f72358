"""What an answer is that goes on with a client's text: reasoning or not, calls, and grammars that begin inside."""

from __future__ import annotations

import json

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from chat_models import chat_model, prepare
from fake_model import text
from family_templates import CHATML, DEEPSEEK, GLM, HARMONY, LLAMA3, SPECIAL
from own_templates import own_template
from random_engine import answer, engine
from server_harness import LocalServer
from server_requests import run, user
from tandem.engine.grammar import sources
from tandem.engine.protocol import Grammar
from tandem.server.chat.answer_parser import AnswerRules
from tandem.server.chat.collect import ChatAnswer, whole_answer
from tandem.server.chat.conversation import Conversation, Message, Tool, ToolChoice
from tandem.server.chat.formats.tool_format import tool_format
from tandem.server.chat.model import PreparedChat

CITY = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = Tool("weather", "Tells it.", CITY, strict=True)


def begun(prefill: str, template: str = CHATML, grammar: Grammar | None = None, **other) -> PreparedChat:
    parsers = {name: other.pop(name) for name in ("reasoning_parser", "tool_parser") if name in other}
    said = (Message("user", "Where?"), Message("assistant", prefill))
    with chat_model(template, special=SPECIAL, **parsers) as (model, _):
        return prepare(model, Conversation(said, continue_final_message=True, **other), grammar=grammar)


def read(prepared: PreparedChat, said: str, pieces: int = 1) -> ChatAnswer:
    parser = prepared.new_parser()
    events = [e for at in range(0, len(said), pieces) for e in parser.push(said[at : at + pieces])]
    return whole_answer([*events, *parser.end("stop")])


THOUGHT = "<think>\nThe user asks about"
CLOSED = "<think>\nok\n</think>\n\nThe capital of"
ANSWERS = [  # template, parser, prefill, the model's text, then what is reasoning and what the answer
    (CHATML, "qwen3", THOUGHT, " it.\n</think>\n\nParis.", " it.", "Paris."),
    (CHATML, "qwen3", "<think>", "\nHm.\n</think>\n\nParis.", "Hm.", "Paris."),
    (CHATML, "qwen3", CLOSED, " France", "", " France"),
    (CHATML, "qwen3", "<think>\nok\n</think>", "\n\nParis.", "", "Paris."),
    (CHATML, "qwen3", "The capital of ", " it <think> is", "", " it <think> is"),
    (CHATML, "qwen3", "1, 2, 3, ", "4", "", "4"),
    (CHATML, "qwen3", "a <thi", "s> b", "", "s> b"),
    (CHATML, "qwen3", "<thi", "nk>Hm.</think>Paris.", "Hm.", "Paris."),
    (CHATML, "qwen3", "<think>Hm.</thi", "nk>Paris.", "", "Paris."),
    *(
        (template, parser, *rest)
        for template in (CHATML, LLAMA3, DEEPSEEK, GLM)
        for parser in ("deepseek-r1", "qwen3-thinking", "step3p5")
        for rest in [("The capital of", " France", "", " France"), (THOUGHT, ".</think>Yes", ".", "Yes")]
        if (template, rest[0]) != (GLM, THOUGHT)  # it puts an empty thought before every answer
    ),
    (CHATML, "deepseek-r1", CLOSED, " France", "", " France"),
    (GLM, "qwen3", CLOSED, " France", "", " France"),
    (HARMONY, "gpt-oss", "The capital of", " France", "", " France"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "parser", "prefill", "said", "reasoning", "shown"), ANSWERS)
@pytest.mark.parametrize("pieces", [1, 1000])
def test_the_answer_lands_where_the_prefill_left_off(
    template, parser, prefill, said, reasoning, shown, pieces
) -> None:
    found = read(begun(prefill, template, reasoning_parser=parser), said, pieces)
    assert (found.reasoning, found.text) == (reasoning, shown)


@pytest.mark.parametrize("pieces", [1, 1000])
def test_a_call_that_was_begun_is_whole(pieces: int) -> None:
    """The client gets all of it, and nothing twice where it is none after all."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    for cut in (3, 14, 30, 50, len(call) - 14):
        rules = AnswerRules(tool_format("hermes"), None, {"weather": WEATHER}, begun=f"Hm. {call[:cut]}")
        found = read(PreparedChat([], None, rules), call[cut:], pieces)
        assert [(one.name, json.loads(one.arguments)) for one in found.calls] == [
            ("weather", {"city": "Paris"})
        ], cut
        assert (found.text, found.finish_reason) == ("", "tool_calls")
        broken = read(PreparedChat([], None, rules), " no call", pieces)
        assert broken.text.strip() == "no call", cut
    done = AnswerRules(tool_format("hermes"), None, {"weather": WEATHER}, begun=call)
    found = read(PreparedChat([], None, done), "\nDone.", pieces)
    assert (found.calls, found.text.strip(), found.finish_reason) == ([], "Done.", "stop")


def test_all_dialects_go_on_with_the_last_turn() -> None:
    """The echo model says what its prompt ends with: all of the last message, and its white space."""

    async def scenario(server: LocalServer) -> None:
        said = [*user("Count."), {"role": "assistant", "content": "1, 2, 3, "}]
        marked = [said[0], said[1] | {"prefix": True}]
        for body in ({"messages": said, "continue_final_message": True}, {"messages": marked}):
            chat = (await server.post("/v1/chat/completions", **body)).json()
            assert chat["choices"][0]["message"]["content"] == "1, 2, 3, "
        tokens = await server.post("/tokenize", messages=said, continue_final_message=True)
        assert bytes(i for i in tokens.json()["tokens"] if i < 256) == b"1, 2, 3, "
        message = (await server.post("/v1/messages", messages=said, max_tokens=20)).json()
        assert message["content"] == [{"type": "text", "text": "1, 2, 3, "}]
        whole = (await server.post("/api/chat", messages=said, stream=False)).json()
        assert whole["message"]["content"] == "1, 2, 3, "

    run(scenario)


# --- grammars


def accepts(prepared: PreparedChat, rest: str) -> bool:
    """Whether the grammar lets the answer be `rest`."""
    grammar, sampling = prepared.sampling.grammar, prepared.sampling
    made = {
        "json_schema": xgrammar.Grammar.from_json_schema,
        "regex": xgrammar.Grammar.from_regex,
        "structural_tag": xgrammar.Grammar.from_structural_tag,
    }[grammar.kind](grammar.text)
    return _is_grammar_accept_string(made, sampling.grammar_prefix + rest)


SCHEMA = sources.json_schema(CITY)
GOES_ON = [
    (CHATML, '{"city": "', 'Paris"}'),
    (CHATML, '{"city": ', '"Paris"}'),
    (CHATML, '{"city":"', 'Paris"}'),
    (CHATML, '{\n  "city": "', 'Paris"\n}'),
    (CHATML, '<think>ok</think>{"city": "', 'Paris"}'),
    (CHATML, '<think>\nok\n</think>\n\n{"city": "', 'Paris"}'),
    (CHATML, "<think>\nok\n</think>\n\n", '{"city": "Paris"}'),
    (CHATML, "<think>\nok", '.\n</think>\n\n{"city": "Paris"}'),
    (LLAMA3, '{"city": "', 'Paris"}'),
    (DEEPSEEK, '{"city": "', 'Paris"}'),
    (GLM, '{"city": "', 'Paris"}'),
    (GLM, '<think>ok</think>{"city": "', 'Paris"}'),
    (HARMONY, '{"city": "', 'Paris"}'),
]


@pytest.mark.parametrize(("template", "prefill", "rest"), GOES_ON)
def test_a_schema_counts_the_prefill(template: str, prefill: str, rest: str) -> None:
    prepared = begun(prefill, template, SCHEMA)
    assert accepts(prepared, rest)
    assert not accepts(prepared, f"{rest}x")
    assert prefill.endswith("\n\n") or rest.startswith(".") or not accepts(prepared, '{"city": "Paris"}')


def test_white_space_in_front_counts_where_the_template_keeps_it() -> None:
    assert accepts(begun("  in", CHATML, Grammar("regex", " +indented")), "dented")
    assert accepts(begun("  in", LLAMA3, Grammar("regex", "indented")), "dented")


def test_calls_count_the_prefill() -> None:
    """Also where free text comes first."""
    hermes = own_template("hermes")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    for choice, prefill in ((ToolChoice("required"), call[:30]), (ToolChoice("auto"), f"Hm. {call[:30]}")):
        prepared = begun(prefill, hermes, tools=(WEATHER,), tool_choice=choice)
        assert accepts(prepared, call[30:]) and not accepts(prepared, '", "x": 1}\n</tool_call>')


def test_an_answer_of_random_logits_and_its_prefill_are_one_text() -> None:
    model = engine()
    for prefix in ("", '{"city"', '{"city": "', '{"city": "x"}'):
        got = answer(model, SCHEMA, grammar_prefix=prefix)
        assert set(json.loads(prefix + text(got))) == {"city"} and got[-1].finish_reason == "stop"
    for prefix in ("Here it is: ", '{"town": "', '{"city": "x"} and'):
        [refused] = answer(model, SCHEMA, grammar_prefix=prefix)
        assert refused.refused == "grammar" and "does not match what the answer must match" in refused.error
    assert answer(model, SCHEMA)[-1].finish_reason == "stop"
