"""/v1/messages with Anthropic's own client. The echo model says what the last user says."""

from __future__ import annotations

import importlib
import json
from typing import Any

import anthropic
import pytest

import echo_engine
from echo_tokenizer import seen_by_the_template
from server_harness import LocalServer
from server_requests import run
from tandem.errors import EngineError
from tandem.server.anthropic.writer import MessageWriter
from tool_outputs import ARGUMENTS, OUTPUTS, TOOLS

HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
THOUGHT = "<think>\nHm, hm.\n</think>\n\n"
PATH = "/v1/messages"
ANTHROPIC_TOOLS: list[Any] = [
    {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
    for tool in TOOLS.values()
]


def client_of(server: LocalServer, key: str = "none") -> anthropic.AsyncAnthropic:
    kind = anthropic.DefaultAsyncHttpxClient  # of httpx, or of what newer versions use
    library = next(base.__module__.split(".")[0] for base in kind.__mro__ if base.__name__ == "AsyncClient")
    transport = importlib.import_module(library).ASGITransport(app=server.app, raise_app_exceptions=False)
    return anthropic.AsyncAnthropic(
        base_url="http://tandem", api_key=key, http_client=kind(transport=transport), max_retries=0
    )


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 1000, "messages": [{"role": "user", "content": text}]} | fields


def events_of(text: str) -> list[dict[str, Any]]:
    """Every event has its type as its name, too."""
    found = []
    for part in filter(None, text.split("\n\n")):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(response: Any, status: int, kind: str) -> str:
    body = response.json()
    assert response.status_code == status, body
    assert body["type"] == "error" and body["error"]["type"] == kind and body["request_id"].startswith("req-")
    return body["error"]["message"]


def test_text_thinking_and_calls():
    async def scenario(server: LocalServer):
        message = await client_of(server).messages.create(
            **asked(THOUGHT + OUTPUTS["hermes"], tools=ANTHROPIC_TOOLS)
        )
        thought, text, first, second = message.content
        assert thought.type == "thinking" and thought.thinking == "Hm, hm." and thought.signature
        assert text.type == "text" and text.text == "Hm."
        assert (first.name, first.input, second.name, second.input) == ("weather", ARGUMENTS, "now", {})
        assert first.id.startswith("toolu_") and first.id != second.id
        assert message.stop_reason == "tool_use" and message.model == "echo" and message.role == "assistant"
        usage = message.usage
        assert usage.output_tokens > 100 and usage.input_tokens > 100
        assert 5 <= usage.output_tokens_details.thinking_tokens < 20

    run(scenario, **HERMES)


def test_streamed_is_whole():
    async def scenario(server: LocalServer):
        client, request = client_of(server), asked(THOUGHT + OUTPUTS["hermes"], tools=ANTHROPIC_TOOLS)
        whole = await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert [strip_id(block) for block in final.content] == [strip_id(block) for block in whole.content]
        assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
        assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(seen)
        assert seen.count("text") == 3 and seen.count("content_block_stop") == 4  # "Hm." token by token

    run(scenario, **HERMES)


def strip_id(block: Any) -> dict[str, Any]:
    said = block.model_dump(exclude_none=True)
    return {key: value for key, value in said.items() if key not in ("id", "parsed_output", "caller")}


def test_the_order_of_events():
    async def scenario(server: LocalServer):
        response = await server.post(PATH, **asked("Hi", stream=True))
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert [event["type"] for event in events] == [
            "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
            "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        start = events[0]["message"]
        assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] == 3
        assert events[2] == {
            "type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""},
        }  # fmt: skip
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens"] == 3  # with the token that ends

    run(scenario)


def test_why_it_stopped():
    async def scenario(server: LocalServer):
        create = client_of(server).messages.create
        stopped = await create(**asked("one, two", stop_sequences=[","]))
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ",")
        assert stopped.content[0].text == "one"
        assert (await create(**asked("one", max_tokens=2))).stop_reason == "max_tokens"
        most = echo_engine.CONTEXT + 1
        assert (await create(**asked("one", max_tokens=most))).stop_reason == "end_turn"
        endless = asked("x" * (echo_engine.CONTEXT - 100), max_tokens=most)
        assert (await create(**endless)).stop_reason == "model_context_window_exceeded"

    run(scenario)


def test_a_malformed_call_is_text_also_in_a_stream():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'

    async def scenario(server: LocalServer):
        client, request = client_of(server), asked(text, tools=ANTHROPIC_TOOLS)
        whole = await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            assert [block.type for block in message.content] == ["text"]
            assert message.content[0].text == text and message.stop_reason == "end_turn"

    run(scenario, **HERMES)


def test_history(monkeypatch):
    """An answer and results go back as the client has them; turns of one role are one turn."""
    seen = seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        create = client_of(server).messages.create
        answer = await create(**asked(THOUGHT + OUTPUTS["hermes"], tools=ANTHROPIC_TOOLS))
        ids = [block.id for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "Rain."}]},
            {"type": "tool_result", "tool_use_id": ids[1], "content": "no clock", "is_error": True},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ]
        messages = [
            {"role": "user", "content": "Weather?"},
            {"role": "user", "content": [{"type": "text", "text": "And the time?"}]},
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]
        system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
        fields = {"messages": messages, "tools": ANTHROPIC_TOOLS, "system": system}
        again = await create(**asked("", **fields))
        assert again.content[0].text == "And now?"
        assert [message["role"] for message in seen] == ["system", "user", "assistant", "tool", "tool", "user"]
        assert seen[0]["content"] == "Be brief.\n\nBe kind."
        assert seen[1]["content"] == "Weather?\n\nAnd the time?"
        assert seen[2]["reasoning_content"] == "Hm, hm." and seen[2]["content"].startswith("Hm.")
        assert [seen[3]["content"], seen[4]["content"]] == ["Rain.", "Error: no clock"]
        assert seen[3]["name"] == "weather"
        late = [{"role": "user", "content": "x"}, {"role": "system", "content": "Stop."}]
        await create(**asked("", messages=[*late, {"role": "user", "content": "y"}]))
        assert [message["role"] for message in seen] == ["user", "system", "user"]

    run(scenario, **HERMES)


def test_what_is_for_billing_is_no_part_of_the_prompt(monkeypatch):
    seen = seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3; cch=0a1b2;"}
        for system in ([billing, {"type": "text", "text": "Be brief."}], [billing]):
            await server.post(PATH, **asked("x", system=system))
            said = [message["content"] for message in seen if message["role"] == "system"]
            assert said == ["Be brief."][: len(system) - 1]

    run(scenario)


def test_an_answer_that_the_client_began(monkeypatch):
    seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        begun = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, tw"}]
        answer = await client_of(server).messages.create(**asked("", messages=begun))
        assert answer.content[0].text == "One, tw"  # the echo's prompt ended there

    run(scenario)


def test_count_tokens():
    async def scenario(server: LocalServer):
        client = client_of(server)
        messages = [{"role": "user", "content": "four"}]
        count = await client.messages.count_tokens(model="any", messages=messages, system="Be brief.")
        answer = await client.messages.create(**asked("four", system="Be brief."))
        assert count.input_tokens == answer.usage.input_tokens == 5

    run(scenario)


def test_usage_tells_what_the_cache_held():
    async def scenario(server: LocalServer):
        create, text = client_of(server).messages.create, "word " * 100
        first = (await create(**asked(text))).usage
        second = (await create(**asked(text))).usage
        assert first.cache_read_input_tokens == 0 and second.cache_read_input_tokens > 400
        assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens == 501

    run(scenario)


def test_wishes_that_the_model_cannot_meet_are_named():
    async def scenario(server: LocalServer):
        thinking = {"type": "enabled", "budget_tokens": 2000}
        response = await server.post(
            PATH, **asked("x", thinking=thinking, output_config={"effort": "high"})
        )
        assert response.status_code == 200
        named = set(response.headers["x-tandem-ignored"].split(", "))
        assert named == {"thinking.budget_tokens", "thinking", "output_config.effort"}
        assert response.headers["request-id"] == response.json()["id"]

    run(scenario, reasoning_parser="none")


def test_thinking_that_is_not_to_be_shown():
    async def scenario(server: LocalServer):
        thinking = {"type": "adaptive", "display": "omitted"}
        message = (await server.post(PATH, **asked(THOUGHT + "Yes.", thinking=thinking))).json()
        assert [block.get("thinking", block.get("text")) for block in message["content"]] == ["", "Yes."]

    run(scenario, **HERMES)


BAD = {
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "a tool of theirs": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    "a tool that is left out": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}],
         "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice",
    ),
    "an unknown tool": (
        {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name",
    ),
    "a call that the echo cannot promise": ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}, "tool_choice"),
    "a result of nothing": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    "only a system": ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
    "temperature": ({"temperature": -1}, "temperature"),
    "stop": ({"stop_sequences": [""]}, "stop"),
    "empty": ({"messages": []}, "messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_complaints_name_the_field(name):
    fields, where = BAD[name]

    async def scenario(server: LocalServer):
        message = error_of(await server.post(PATH, **asked("x", **fields)), 400, "invalid_request_error")
        assert where in message

    run(scenario, **HERMES)


def test_errors_are_those_of_the_client():
    async def scenario(server: LocalServer):
        with pytest.raises(anthropic.AuthenticationError):
            await client_of(server, "wrong").messages.create(**asked("x"))
        assert (await client_of(server, "s3cret").messages.create(**asked("x"))).content[0].text == "x"
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: at least 5000 tokens > 4095 maximum"):
            await client_of(server, "s3cret").messages.create(**asked("x" * 5000))
        unauthorized = await server.post(PATH, **asked("x"))
        error_of(unauthorized, 401, "authentication_error")

    run(scenario, api_key="s3cret")


def test_an_engine_that_fails_ends_the_stream_with_an_event():
    async def scenario(server: LocalServer):
        response = await server.post(PATH, **asked("raise! now"))
        error_of(response, 503, "overloaded_error")

        def died(writer: MessageWriter) -> bytes:
            raise EngineError("the engine died")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MessageWriter, "last", died)
            events = events_of((await server.post(PATH, **asked("x", stream=True))).text)
        assert events[-1]["type"] == "error" and events[-1]["error"]["message"] == "the engine died"

    run(scenario)
