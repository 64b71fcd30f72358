"""A stream begins before a long prompt is computed, so that clients and proxies do not give up."""

from __future__ import annotations

import json

import openai
import pytest

import echo_engine
from server_harness import LocalServer
from server_requests import error_of, run, user
from tandem.server import generation
from tandem.server.responses import writer as responses_writer

LONG = "ab" * 1000  # several steps of the echo engine
STEP = 0.03  # seconds
ASKED = {
    "/v1/chat/completions": {"messages": user(LONG), "max_tokens": 2},
    "/v1/completions": {"prompt": LONG, "max_tokens": 2},
    "/generate": {"text": LONG, "sampling_params": {"max_new_tokens": 2}},
    "/v1/messages": {"messages": user(LONG), "max_tokens": 2},
    "/v1/responses": {"input": LONG, "max_output_tokens": 2},
    "/api/chat": {"messages": user(LONG), "options": {"num_predict": 2}},
}
FIRST = {  # what is said before the first token
    "/v1/messages": b"event: message_start\n",
    "/v1/responses": b"event: response.created\n",
    "/api/chat": b'{"model":"echo","created_at":',
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "WAITING_SECONDS", STEP / 3)
    monkeypatch.setattr(responses_writer, "WAITING_SECONDS", STEP / 3)


def slow(scenario, **flags) -> None:
    run(scenario, loaded=echo_engine.build(seconds_per_step=STEP), **flags)


@pytest.mark.parametrize("path", ASKED)
def test_something_is_said_before_the_first_token(path: str):
    async def scenario(server: LocalServer):
        response = await server.post(path, **ASKED[path], stream=True)
        assert response.status_code == 200
        assert response.content.startswith(FIRST.get(path, b": waiting\n\n")), response.text[:300]
        assert "error" not in response.text.replace('"error":null', "")

    slow(scenario)


def test_a_message_begins_once_and_before_its_pings():
    """Anthropic's clients take a ping before the message for a mistake of the protocol."""

    async def scenario(server: LocalServer):
        response = await server.post("/v1/messages", **ASKED["/v1/messages"], stream=True)
        names = [line for line in response.text.split("\n") if line.startswith("event: ")]
        assert names.index("event: message_start") == 0 and names.count("event: message_start") == 1
        assert names[1] == "event: ping"
        start = json.loads(response.text.split("\n")[1].removeprefix("data: "))
        assert start["message"]["usage"]["input_tokens"] == len(LONG) + 1  # the echo's mark behind a prompt

    slow(scenario)


def test_clients_skip_it():
    async def scenario(server: LocalServer):
        one = openai.AsyncOpenAI(base_url="http://tandem/v1", api_key="x", http_client=server.client)
        chat = await one.chat.completions.create(model="x", messages=user(LONG), max_tokens=4, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == "abab"
        async with one.responses.stream(model="x", input=LONG, max_output_tokens=4) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == "abab"

    slow(scenario)


def test_a_call_that_is_being_written_is_waited_for():
    """Its arguments come in one piece."""
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "%s"}}\n</tool_call>' % ("y" * 40)

    async def scenario(server: LocalServer):
        tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
        response = await server.post("/v1/responses", input=call, tools=tools, stream=True)
        names = [line for line in response.text.split("\n") if line.startswith("event: ")]
        last = names.index("event: response.output_item.added")
        assert names[:last].count("event: response.in_progress") > 5
        numbers = [
            json.loads(line.removeprefix("data: "))["sequence_number"]
            for line in response.text.split("\n")
            if line.startswith("data: ")
        ]
        assert numbers == list(range(len(numbers)))

    slow(scenario, tool_call_parser="hermes")


def test_an_engine_that_fails_meanwhile_ends_the_stream():
    """A refusal that comes at once has its own status still."""

    async def scenario(server: LocalServer):
        response = await server.post("/v1/chat/completions", messages=user("raise!" + LONG), stream=True)
        assert '"code":"engine_unavailable"' in response.text or response.status_code == 503
        error_of(await server.post("/v1/chat/completions", messages=user("x" * 9000), stream=True), 400)

    slow(scenario)
