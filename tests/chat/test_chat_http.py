"""Tools and reasoning over HTTP: the echo model says what the last user says, the server finds the calls in it."""

from __future__ import annotations

import json

import pytest

import echo_engine
from server_harness import LocalServer
from server_requests import CHAT, error_of, events, run, user
from tool_outputs import ARGUMENTS, OPENAI_TOOLS, OUTPUTS

HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
ANSWER = f"<think>\nHm, hm.\n</think>\n\n{OUTPUTS['hermes']}"


async def whole(server: LocalServer, text: str, **fields) -> dict:
    response = await server.post(CHAT, messages=user(text), **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def streamed(server: LocalServer, text: str, **fields) -> list[dict]:
    response = await server.post(CHAT, messages=user(text), stream=True, **fields)
    return [chunk["choices"][0] for chunk in events(response.text) if chunk["choices"]]


def test_calls_and_reasoning():
    async def scenario(server: LocalServer):
        choice = await whole(server, ANSWER, tools=OPENAI_TOOLS)
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == "Hm." and message["reasoning_content"] == "Hm, hm."
        assert [call["type"] for call in message["tool_calls"]] == ["function", "function"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        alone = await whole(server, OUTPUTS["hermes"].removeprefix("Hm.\n"), tools=OPENAI_TOOLS)
        assert alone["message"]["content"] is None and "reasoning_content" not in alone["message"]

    run(scenario, **HERMES)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True}])
def test_streamed_as_openai_does(fields):
    async def scenario(server: LocalServer):
        chunks = await streamed(server, ANSWER, tools=OPENAI_TOOLS, **fields)
        for index in range(fields.get("n", 1)):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"].get("reasoning_content", "") for c in mine) == "Hm, hm."
            assert "".join(c["delta"].get("content", "") for c in mine) == "Hm."
            deltas = [c["delta"]["tool_calls"][0] for c in mine if "tool_calls" in c["delta"]]
            begun = [delta for delta in deltas if "id" in delta]
            assert [d["function"] for d in begun] == [
                {"name": "weather", "arguments": ""}, {"name": "now", "arguments": ""},
            ]  # fmt: skip
            assert [d["index"] for d in begun] == [0, 1] and all(d["type"] == "function" for d in begun)
            pieces = [d for d in deltas if "id" not in d]
            assert all(
                set(d) == {"index", "function"} and set(d["function"]) == {"arguments"} for d in pieces
            )
            assert len(pieces) > 10  # as they come
            for number, arguments in enumerate((ARGUMENTS, {})):
                text = "".join(d["function"]["arguments"] for d in pieces if d["index"] == number)
                assert json.loads(text) == arguments
            assert [c["finish_reason"] for c in mine][-1] == "tool_calls"
            if "logprobs" in fields:
                tokens = [e["token"] for c in mine for e in (c["logprobs"] or {"content": []})["content"]]
                assert len(tokens) == len(ANSWER.encode()) + 1

    run(scenario, **HERMES)


def test_text_is_text_where_no_tools_are_given():
    async def scenario(server: LocalServer):
        for fields in ({}, {"tools": OPENAI_TOOLS, "tool_choice": "none"}):
            choice = await whole(server, OUTPUTS["hermes"], **fields)
            assert choice["message"]["content"] == OUTPUTS["hermes"] and choice["finish_reason"] == "stop"
            assert "tool_calls" not in choice["message"]

    run(scenario, **HERMES)


def test_malformed_calls_are_text():
    async def scenario(server: LocalServer):
        for text in (
            '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>',
            "<tool_call>",
            "</think>",
        ):
            choice = await whole(server, text, tools=OPENAI_TOOLS)
            assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
            chunks = await streamed(server, text, tools=OPENAI_TOOLS)
            assert chunks[-1]["finish_reason"] == "stop"

    run(scenario, **HERMES)


def test_a_call_that_is_cut_says_so():
    async def scenario(server: LocalServer):
        choice = await whole(server, OUTPUTS["hermes"], tools=OPENAI_TOOLS, max_tokens=80)
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "length" and call["function"]["arguments"].startswith('{"city"')

    run(scenario, **HERMES)


def test_one_call_where_more_are_not_wanted():
    async def scenario(server: LocalServer):
        choice = await whole(server, OUTPUTS["hermes"], tools=OPENAI_TOOLS, parallel_tool_calls=False)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]

    run(scenario, **HERMES)


def test_reasoning_as_it_was_asked_for():
    async def scenario(server: LocalServer):
        text = "<think>\nHm, hm.\n</think>\n\nYes."
        assert (await whole(server, text, separate_reasoning=False))["message"]["content"] == text
        hidden = (await whole(server, text, include_reasoning=False))["message"]
        assert hidden["content"] == "Yes." and "reasoning_content" not in hidden
        at_once = await streamed(server, text, stream_reasoning=False)
        assert [c["delta"]["reasoning_content"] for c in at_once if "reasoning_content" in c["delta"]] == [
            "Hm, hm."
        ]

    run(scenario, **HERMES)


def test_history_is_taken_back():
    """What the server answered, and what clients make of it: null content, refusals, results in parts."""

    async def scenario(server: LocalServer):
        answer = (await whole(server, ANSWER, tools=OPENAI_TOOLS))["message"]
        ids = [call["id"] for call in answer["tool_calls"]]
        history = [
            *user("Weather?"),
            answer,
            {"role": "tool", "tool_call_id": ids[0], "content": [{"type": "text", "text": "Rain."}]},
            {"role": "tool", "tool_call_id": ids[1], "content": None},
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": "x", "tool_calls": None, "reasoning": "y"},
            *user("and now?"),
        ]
        response = await server.post(CHAT, messages=history, tools=OPENAI_TOOLS)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "and now?"
        assert "x-tandem-ignored" not in response.headers

    run(scenario, **HERMES)


def test_an_effort_is_a_wish():
    """Clients for reasoning models send one to every model."""

    async def scenario(server: LocalServer, ignored: str | None, effort: str = "medium"):
        response = await server.post(CHAT, messages=user("Yes."), reasoning_effort=effort)
        assert response.status_code == 200, response.text
        assert response.headers.get("x-tandem-ignored") == ignored
        asked = await server.post(CHAT, messages=user("x"), reasoning_effort=effort, thinking_budget=7)
        assert error_of(asked, 400)["param"] == "thinking_budget"

    run(lambda server: scenario(server, "reasoning_effort"), reasoning_parser="none")
    run(lambda server: scenario(server, None, "none"), reasoning_parser="none")
    run(lambda server: scenario(server, None), **HERMES)


BAD_TOOLS = {
    "unknown name": ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
    "no such choice": ({"tool_choice": "always"}, "tool_choice"),
    "a result of nothing": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    "parameters": ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, None),
}


@pytest.mark.parametrize("name", BAD_TOOLS)
def test_complaints_name_the_field(name):
    fields, param = BAD_TOOLS[name]

    async def scenario(server: LocalServer):
        error = error_of(
            await server.post(CHAT, **{"messages": user("x"), "tools": OPENAI_TOOLS} | fields), 400
        )
        assert param in (None, error["param"])

    run(scenario, **HERMES)


def test_a_call_cannot_be_promised_without_constraints():
    async def scenario(server: LocalServer):
        error = error_of(
            await server.post(CHAT, messages=user("x"), tools=OPENAI_TOOLS, tool_choice="required"), 400
        )
        assert error["param"] == "tool_choice" and error["code"] == "not_available"

    run(scenario, **HERMES)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_beyond_the_context_is_cut_to_it(field):
    """opencode asks for 32,000 tokens whatever the model is, and other agents for as many as the context has."""

    async def scenario(server: LocalServer):
        assert (await whole(server, "one", **{field: 32000}))["finish_reason"] == "stop"
        unlimited = await whole(server, "x" * 100, **{field: -1})  # LM Studio's, and what Cline's descendants send
        assert unlimited["message"]["content"] == "x" * 100
        cut = await whole(server, "x" * (echo_engine.CONTEXT - 100), **{field: 32000})
        assert cut["finish_reason"] == "length" and 0 < len(cut["message"]["content"]) < 100
        too_long = await server.post(CHAT, messages=user("x" * 5000), **{field: 32000})
        assert error_of(too_long, 400)["param"] == "messages"

    run(scenario)
