"""How answers end in every chat dialect: cut, aborted, with strings that no answer can say, by a mistake of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import echo_engine
from server_harness import LocalServer, local_server
from server_requests import CHAT, pages_are_back, run, user
from tandem.server.anthropic.writer import MessageWriter
from tandem.server.chat.openai.writer import ChatWriter
from tandem.server.ollama.writer import OllamaWriter
from tandem.server.responses.writer import ResponseWriter
from tool_outputs import OPENAI_TOOLS, OUTPUTS, TOOLS

HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
FLAT = [{"type": "function", "name": t.name, "parameters": t.parameters} for t in TOOLS.values()]
BLOCKS = [{"name": t.name, "input_schema": t.parameters} for t in TOOLS.values()]


class Dialect(NamedTuple):
    """`ask(text, limit)` is a body. `ends`: which of a stream's objects are its end."""

    path: str
    writer: type
    ask: Callable[[str, int], dict[str, Any]]
    ends: Callable[[dict[str, Any]], bool]


DIALECTS = {
    "openai": Dialect(
        CHAT, ChatWriter,
        lambda text, limit: {"messages": user(text), "tools": OPENAI_TOOLS, "max_tokens": limit},
        lambda event: "error" in event or event["choices"][0]["finish_reason"] is not None,
    ),
    "anthropic": Dialect(
        "/v1/messages", MessageWriter,
        lambda text, limit: {"messages": user(text), "tools": BLOCKS, "max_tokens": limit},
        lambda event: event["type"] in ("error", "message_stop"),
    ),
    "responses": Dialect(
        "/v1/responses", ResponseWriter,
        lambda text, limit: {"input": text, "tools": FLAT, "max_output_tokens": limit},
        lambda event: event["type"] in (
            "error", "response.failed", "response.completed", "response.incomplete"
        ),
    ),
    "ollama": Dialect(
        "/api/chat", OllamaWriter,
        lambda text, limit: {"messages": user(text), "tools": OPENAI_TOOLS, "options": {"num_predict": limit}},
        lambda event: "error" in event or event["done"],
    ),
}  # fmt: skip


def events_of(text: str) -> list[dict[str, Any]]:
    """Of server-sent events, or of lines."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if not line.startswith("event: ")]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


async def both(server: LocalServer, name: str, text: str, limit: int = 1000) -> tuple[dict, list[dict]]:
    """The whole answer, and a stream's events."""
    dialect = DIALECTS[name]
    whole = await server.post(dialect.path, **dialect.ask(text, limit), stream=False)
    assert whole.status_code == 200, whole.text
    streamed = events_of((await server.post(dialect.path, **dialect.ask(text, limit), stream=True)).text)
    assert [dialect.ends(event) for event in streamed].count(True) == 1 and dialect.ends(streamed[-1])
    return whole.json(), streamed


@pytest.mark.parametrize("when", ["frames", "last"])
@pytest.mark.parametrize("name", DIALECTS)
def test_a_mistake_of_a_writer_ends_its_stream_with_one_event(name, when, monkeypatch, caplog):
    """And the request is released. Others go on."""
    dialect = DIALECTS[name]
    right, calls = getattr(dialect.writer, when), []

    def wrong(writer, *arguments):
        calls.append(writer)
        if when == "last" or len(calls) == 4:
            raise ZeroDivisionError("a slip")
        return right(writer, *arguments)

    async def go():
        async with local_server(echo_engine.build(seconds_per_step=0.005), **HERMES) as server:
            with monkeypatch.context() as patch:
                patch.setattr(dialect.writer, when, wrong)
                response = await server.post(dialect.path, **dialect.ask("x" * 40, 1000), stream=True)
            assert response.status_code == 200
            events = events_of(response.text)
            said = [event for event in events if "mistake" in json.dumps(event)]
            assert said == [events[-1]] and dialect.ends(events[-1])
            assert "a slip" not in response.text  # which is for the log
            await pages_are_back(server)
            assert server.state.client.open_answers == 0
            assert (await server.post(dialect.path, **dialect.ask("x", 10), stream=True)).status_code == 200

    asyncio.run(go())
    assert any("a bug in the server" in record.message and record.exc_info for record in caplog.records)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_mistake_in_a_whole_answer_is_an_error_of_the_dialect(name, monkeypatch):
    dialect = DIALECTS[name]

    def wrong(writer):
        raise ZeroDivisionError("a slip")

    async def scenario(server: LocalServer):
        monkeypatch.setattr(dialect.writer, "whole", wrong)
        response = await server.post(dialect.path, **dialect.ask("x", 10), stream=False)
        assert response.status_code == 500 and response.headers["x-request-id"]
        assert "its log says where" in response.text
        assert ("request_id" in response.json()) == (name == "anthropic")
        assert isinstance(response.json()["error"], str) == (name == "ollama")

    run(scenario, **HERMES)


HALF, LOST = chr(0xD83D), chr(0xFFFD)
SURROGATES = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "\\ud83d \\ud83d\\ude00"}}\n</tool_call>',
    "pythonic": "[weather(city='\\ud83d \\U0001f600')]",
}


@pytest.mark.parametrize("parser", SURROGATES)
@pytest.mark.parametrize("name", DIALECTS)
def test_half_a_character_in_arguments(name, parser):
    async def scenario(server: LocalServer):
        whole, streamed = await both(server, name, SURROGATES[parser])
        city = json.loads(arguments_of(name, whole, streamed))["city"]
        kept = HALF if name in ("openai", "responses") and parser == "hermes" else LOST
        assert city == f"{kept} 😀"  # OpenAI's has the JSON text that the model wrote
        assert streamed_arguments(name, streamed) == arguments_of(name, whole, streamed)

    run(scenario, **HERMES | {"tool_call_parser": parser})


def test_half_a_character_in_history(monkeypatch):
    """A template's process takes JSON, and a tokenizer UTF-8."""
    from chat_models import prompt_of
    from own_templates import own_template
    from tandem.server.chat.conversation import Conversation, Message, ToolCall

    call = ToolCall("call_1", "weather", '{"city": "\\udc00"}')
    result = Message("tool", "y", tool_call_id="call_1")
    said = (Message("user", "x"), Message("assistant", "", tool_calls=(call,)), result)
    for name in ("hermes", "qwen3_coder", "deepseekv31"):
        prompt = prompt_of(own_template(name), Conversation(said))
        assert LOST in prompt or "\\ufffd" in prompt


def arguments_of(name: str, whole: dict, streamed: list[dict]) -> str:
    if name == "openai":
        return whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    if name == "anthropic":
        return json.dumps(whole["content"][-1]["input"], ensure_ascii=False, separators=(",", ":"))
    if name == "responses":
        return whole["output"][-1]["arguments"]
    return json.dumps(whole["message"]["tool_calls"][0]["function"]["arguments"])


def streamed_arguments(name: str, events: list[dict]) -> str:
    if name == "openai":
        deltas = [call for e in events for call in e["choices"][0]["delta"].get("tool_calls", ())]
        return "".join(delta["function"].get("arguments", "") for delta in deltas)
    if name == "anthropic":
        return "".join(e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta")
    if name == "responses":
        return "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    calls = [call for e in events for call in e["message"].get("tool_calls", ())]
    return json.dumps(calls[0]["function"]["arguments"])


CUT_AT = 80  # tokens of OUTPUTS["hermes"], in the midst of the first call's arguments


def test_a_call_that_is_cut_in_openais_chat():
    async def scenario(server: LocalServer):
        whole, streamed = await both(server, "openai", OUTPUTS["hermes"], CUT_AT)
        [choice] = whole["choices"]
        assert choice["finish_reason"] == "length" == streamed[-1]["choices"][0]["finish_reason"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == streamed_arguments("openai", streamed)

    run(scenario, **HERMES)


def test_a_call_that_is_cut_in_anthropics_messages():
    """Nothing looks like a call that can be run."""

    async def scenario(server: LocalServer):
        whole, streamed = await both(server, "anthropic", OUTPUTS["hermes"], CUT_AT)
        assert whole["stop_reason"] == "max_tokens"
        assert {block["type"] for block in whole["content"]} == {"text"}
        assert "".join(block["text"] for block in whole["content"]).startswith('Hm.<tool_call>\n{"name": "weather"')
        assert streamed[-2]["delta"]["stop_reason"] == "max_tokens"
        begun = [e["content_block"]["type"] for e in streamed if e["type"] == "content_block_start"]
        assert set(begun) == {"text"}

    run(scenario, **HERMES)


def test_a_call_that_is_cut_in_responses(monkeypatch):
    async def scenario(server: LocalServer):
        whole, streamed = await both(server, "responses", OUTPUTS["hermes"], CUT_AT)
        for response in (whole, streamed[-1]["response"]):
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            message, call = response["output"]
            assert message["status"] == "completed" and call["type"] == "function_call"
            assert call["status"] == "incomplete" and call["arguments"].startswith('{"city"')
        assert streamed[-1]["type"] == "response.incomplete"
        assert "response.function_call_arguments.done" not in {event["type"] for event in streamed}
        on = await server.post("/v1/responses", input="Go on.", previous_response_id=whole["id"])
        assert on.json()["output"][0]["content"][0]["text"] == "Go on."

    run(scenario, **HERMES)


def test_a_call_that_is_cut_in_ollamas_chat():
    async def scenario(server: LocalServer):
        whole, streamed = await both(server, "ollama", OUTPUTS["hermes"], CUT_AT)
        assert whole["done_reason"] == "length" == streamed[-1]["done_reason"]
        assert "tool_calls" not in whole["message"]
        assert not [event for event in streamed if "tool_calls" in event["message"]]
        text = "".join(event["message"]["content"] for event in streamed)
        assert text == whole["message"]["content"] and '{"name": "weather"' in text

    run(scenario, **HERMES)


@pytest.mark.parametrize("name", DIALECTS)
def test_an_answer_that_is_aborted_is_not_complete(name):
    """In the midst of a call's arguments."""
    dialect = DIALECTS[name]

    async def go():
        async with local_server(echo_engine.build(seconds_per_step=0.01), **HERMES) as server:
            body = dialect.ask(OUTPUTS["hermes"], 1000)
            asked = [asyncio.create_task(server.post(dialect.path, **body, stream=s)) for s in (False, True)]
            while server.state.client.stats.generated_tokens < 2 * CUT_AT:
                await asyncio.sleep(0.005)
            await server.post("/abort_request", abort_all=True)
            whole, stream = [await each for each in asked]
            whole, streamed = whole.json(), events_of(stream.text)
            assert [dialect.ends(event) for event in streamed].count(True) == 1
            assert ended(name, whole, streamed) == (ABORTED[name], ABORTED[name])
            await pages_are_back(server)

    asyncio.run(go())


ABORTED = {"openai": "abort", "anthropic": "max_tokens", "responses": "aborted", "ollama": "length"}


def ended(name: str, whole: dict, events: list[dict]) -> tuple[str, str]:
    """Why, as both say it."""
    if name == "openai":
        return whole["choices"][0]["finish_reason"], events[-1]["choices"][0]["finish_reason"]
    if name == "anthropic":
        assert "tool_use" not in json.dumps([whole, events])
        return whole["stop_reason"], events[-2]["delta"]["stop_reason"]
    if name == "responses":
        both = whole, events[-1]["response"]
        assert all(r["status"] == "incomplete" and r["output"][-1]["status"] == "incomplete" for r in both)
        return whole["incomplete_details"]["reason"], both[1]["incomplete_details"]["reason"]
    assert "tool_calls" not in json.dumps([whole, events])
    return whole["done_reason"], events[-1]["done_reason"]
