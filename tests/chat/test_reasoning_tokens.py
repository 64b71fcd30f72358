"""`reasoning_tokens`: the same number however many tokens come at once, streamed or whole, in every dialect."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from server_harness import LocalServer
from server_requests import CHAT, events, run, user
from tandem.engine.protocol import TokenOutput
from tandem.engine.step.step import merged
from tandem.server.chat.answer_parser import AnswerRules, PlainText
from tandem.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments
from tandem.server.chat.formats.reasoning_format import reasoning_format
from tandem.server.chat.formats.tool_format import tool_format
from tandem.server.chat.one_answer import OneAnswer
from tool_outputs import OPENAI_TOOLS, OUTPUTS, TOOLS

HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
REASONING = "<think>\nHm,  hm.\n\n</think>"
HARMONY = "<|channel|>analysis<|message|>Hm, hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."


def tokens_of(text: str, end: str = "") -> list[TokenOutput]:
    """A token a character, and one without text. end: what was held back and comes with the last."""
    outputs = [TokenOutput(id="x", index=0, text=char, token_ids=[i]) for i, char in enumerate(text)]
    last = TokenOutput(id="x", index=0, text=end, token_ids=[len(text)], finish_reason="stop")
    return [*outputs, last]


def in_groups(outputs: list[TokenOutput], chance: random.Random) -> list[TokenOutput]:
    """As steps with draft tokens give them."""
    made = []
    while outputs:
        count = chance.randint(1, 6)
        made.append(merged(outputs[:count]))
        outputs = outputs[count:]
    return made


def counted(rules: AnswerRules, outputs: list[TokenOutput]) -> tuple[int, list]:
    """The tokens, and the events, neighbours of one kind together. Those of one output come so."""
    answer = OneAnswer(rules.new_parser())
    by_output = [answer.events(output) for output in outputs]
    assert all(len(together(said)) == len(said) for said in by_output)
    return answer.reasoning_tokens, together(event for said in by_output for event in said)


def together(said: Iterable[ChatEvent]) -> list[tuple]:
    """Of neighbours of one kind, and of one call, all text; without calls' ids, which are new every time."""
    grown: list[tuple] = []
    for event in said:
        kind, call = type(event), getattr(event, "index", None)
        text = "".join(getattr(event, name, "") for name in ("text", "fragment", "name", "raw", "outcome", "reason"))
        if kind in (TextDelta, ReasoningDelta, ToolCallArguments) and grown and grown[-1][:2] == (kind, call):
            text = grown.pop()[2] + text
        grown.append((kind, call, text))
    return grown


def rules(tools: str | None, reasoning: str, **other) -> AnswerRules:
    return AnswerRules(
        None if tools is None else tool_format(tools), reasoning_format(reasoning), TOOLS if tools else {}, **other
    )


CASES = {
    "thought": (rules("hermes", "qwen3"), REASONING + "Yes.", len(REASONING)),
    "begun by the prompt": (
        rules(None, "deepseek-r1", in_reasoning=True), "Hm.\n</think>\n\nYes.", len("Hm.\n</think>"),
    ),
    "never ended": (rules("hermes", "qwen3"), "<think>Hm, hm", len("<think>Hm, hm") + 1),
    "none": (rules("hermes", "qwen3"), "Yes, <b>.", 0),
    "held back": (rules(None, "qwen3", stream_reasoning=False), REASONING + "Yes.", len(REASONING)),
}  # fmt: skip


@pytest.mark.parametrize(("how", "text", "expected"), CASES.values(), ids=CASES)
def test_tokens_from_the_first_marker_to_the_last(how, text, expected) -> None:
    """The last character of a marker shows that it is one: those before it count when reasoning had begun."""
    opening = len("<think>") - 1 if text.startswith("<think>") else 0
    found, said = counted(how, tokens_of(text))
    assert found == expected - opening
    for seed in range(20):
        again, others = counted(how, in_groups(tokens_of(text), random.Random(seed)))
        assert again == found
        assert others == said


@pytest.mark.parametrize("name", ["hermes", "gpt-oss"])
def test_groups_with_calls_and_channels(name) -> None:
    how = rules(name, "qwen3" if name == "hermes" else "gpt-oss")
    text = REASONING + OUTPUTS["hermes"] if name == "hermes" else HARMONY
    found, said = counted(how, tokens_of(text))
    assert 0 < found < len(text)
    for seed in range(20):
        again, others = counted(how, in_groups(tokens_of(text), random.Random(seed)))
        assert again == found
        assert others == said


def test_text_that_was_held_back_until_the_end_is_not_lost() -> None:
    outputs = tokens_of("ab", end="cd")
    answer = OneAnswer(PlainText())
    one = merged([*outputs[:2], TokenOutput(id="x", index=0, text="cd", token_ids=[], finish_reason="abort")])
    assert one.lengths == [1, 1]
    assert "".join(getattr(event, "text", "") for event in answer.events(one)) == "abcd"
    assert answer.reasoning_tokens == 0


def test_every_dialect_tells_the_same_number() -> None:
    async def scenario(server: LocalServer):
        text = REASONING + OUTPUTS["hermes"]
        asked = {"messages": user(text), "tools": OPENAI_TOOLS}
        whole = (await server.post(CHAT, **asked)).json()["usage"]
        number = whole["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < number < whole["completion_tokens"]
        options = {"include_usage": True}
        response = await server.post(CHAT, **asked, stream=True, stream_options=options)
        streamed = events(response.text)[-1]["usage"]
        assert streamed["completion_tokens_details"] == {"reasoning_tokens": number}
        twice = (await server.post(CHAT, **asked, n=2)).json()["usage"]
        assert twice["completion_tokens_details"]["reasoning_tokens"] == 2 * number
        functions = [{"type": "function", **tool["function"]} for tool in OPENAI_TOOLS]
        answer = (await server.post("/v1/responses", input=text, tools=functions)).json()
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == number

    run(scenario, **HERMES)
