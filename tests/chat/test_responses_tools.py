"""/v1/responses with tools as coding agents send them: namespaces, custom tools, and OpenAI's own."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from echo_tokenizer import EchoTokenizer
from server_harness import LocalServer
from server_requests import error_of, run
from tandem.server.fields import IGNORED_HEADER

HERMES = {"tool_call_parser": "hermes"}
PATH = "/v1/responses"
SPAWN = {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "For helpers.", "tools": [SPAWN]}
PATCH = {
    "type": "custom", "name": "patch", "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}  # fmt: skip
SEARCH = {"type": "web_search", "external_web_access": False}
TOOLS = [AGENTS, PATCH, SEARCH]
TEXT = '*** Begin Patch\n"ü"\n*** End Patch'


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


BOTH = call("agents__spawn", task="x") + "\n" + call("patch", input=TEXT)


def client_of(server: LocalServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://tandem/v1", api_key="none", http_client=server.client, max_retries=0
    )


def test_calls_come_back_as_the_client_named_them():
    async def scenario(server: LocalServer):
        answer = await client_of(server).responses.create(model="any", input=BOTH, tools=TOOLS)
        spawned, patched = answer.output
        assert (spawned.type, spawned.namespace, spawned.name) == ("function_call", "agents", "spawn")
        assert json.loads(spawned.arguments) == {"task": "x"}
        assert (patched.type, patched.name, patched.input) == ("custom_tool_call", "patch", TEXT)
        assert answer.tools[0].type == "namespace"

    run(scenario, **HERMES)


def test_the_stream_says_the_same():
    async def scenario(server: LocalServer):
        stream = await client_of(server).responses.create(model="any", input=BOTH, tools=TOOLS, stream=True)
        events = [event async for event in stream]
        added = [event.item for event in events if event.type == "response.output_item.added"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.type for item in added] == ["function_call", "custom_tool_call"]
        assert done == events[-1].response.output and added[1].input == "" and done[1].input == TEXT
        pieces = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
        assert [event.type.rpartition(".")[2] for event in pieces] == ["delta", "done"]
        assert pieces[0].delta == pieces[1].input == TEXT and pieces[0].item_id == done[1].id

    run(scenario, **HERMES)


def test_history_has_the_models_names(monkeypatch):
    seen: list[dict[str, Any]] = []

    def noted(self: EchoTokenizer, messages: list[dict[str, Any]], **variables: Any) -> str:
        seen[:] = messages
        return str(messages[-1]["content"])

    async def scenario(server: LocalServer):
        client = client_of(server)
        first = await client.responses.create(model="any", input=BOTH, tools=TOOLS)
        monkeypatch.setattr(EchoTokenizer, "apply_chat_template", noted)
        results = [
            {"type": f"{item.type}_output", "call_id": item.call_id, "output": "Done."}
            for item in first.output
        ]
        await client.responses.create(model="any", input=results, previous_response_id=first.id)
        stored = list(seen)
        calls = [each["function"] for each in stored[1]["tool_calls"]]
        assert calls == [
            {"name": "agents__spawn", "arguments": {"task": "x"}},
            {"name": "patch", "arguments": {"input": TEXT}},
        ]
        items = [item.model_dump(exclude_none=True) for item in first.output]
        await client.responses.create(
            model="any", input=[{"role": "user", "content": BOTH}, *items, *results]
        )
        assert seen == stored

    run(scenario, **HERMES)


def test_what_the_model_is_told(monkeypatch):
    offered: list[dict[str, Any]] = []

    def noted(self: EchoTokenizer, messages: list[dict[str, Any]], tools: Any = (), **variables: Any) -> str:
        offered[:] = [tool["function"] for tool in tools]
        return "Hi"

    monkeypatch.setattr("tandem.server.chat.template_fit._Trial._renders_tools", lambda self: True)

    async def scenario(server: LocalServer):
        monkeypatch.setattr(EchoTokenizer, "apply_chat_template", noted)
        response = await server.post(PATH, input="x", tools=TOOLS)
        assert response.headers[IGNORED_HEADER] == "tools[1].format, tools[2]"
        spawn, patch = offered
        assert spawn["name"] == "agents__spawn" and spawn["description"] == "For helpers.\n\nStarts one."
        assert list(patch["parameters"]["properties"]) == ["input"] and "start: /.+/" in patch["description"]

    run(scenario, **HERMES)


def test_a_custom_call_that_was_cut_is_text():
    async def scenario(server: LocalServer):
        answer = await client_of(server).responses.create(
            model="any", input=BOTH, tools=TOOLS, max_output_tokens=len(BOTH.encode()) - 30
        )
        assert answer.status == "incomplete"
        assert [item.type for item in answer.output] == ["function_call", "message"]

    run(scenario, **HERMES)


BAD = {
    "one name twice": ({"tools": [AGENTS, SPAWN | {"name": "agents__spawn"}]}, "tools[1].name"),
    "a space without a name": ({"tools": [AGENTS | {"name": None}]}, "tools[0].name"),
    "a space in a space": ({"tools": [AGENTS | {"tools": [AGENTS]}]}, "tools[0].tools[0].type"),
    "a grammar of another kind": ({"tools": [PATCH | {"format": {"type": "x"}}]}, "tools[0].format.type"),
    "a choice of what is left out": ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    "a call without a name": (
        {"input": [{"type": "custom_tool_call", "call_id": "1", "input": "x"}]}, "input[0].name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_complaints_name_the_field(name):
    fields, param = BAD[name]

    async def scenario(server: LocalServer):
        assert error_of(await server.post(PATH, **{"input": "x"} | fields), 400)["param"] == param

    run(scenario, **HERMES)


def test_a_stream_of_a_prompt_that_is_too_long_fails_as_openais():
    """Agents then shorten the conversation. Without a stream it is a 400."""

    async def scenario(server: LocalServer):
        response = await server.post(PATH, input="x" * 5000, stream=True)
        assert response.status_code == 200 and response.headers["content-type"].startswith(
            "text/event-stream"
        )
        lines = response.text.strip().split("\n")
        assert [line for line in lines if line.startswith("event")] == [
            "event: response.created", "event: response.in_progress", "event: response.failed",
        ]  # fmt: skip
        error = json.loads(lines[-1].removeprefix("data: "))["response"]["error"]
        assert error["code"] == "context_length_exceeded" and "4096" in error["message"]
        assert error_of(await server.post(PATH, input="x" * 5000), 400)["code"] == error["code"]

    run(scenario)
