"""Which tools a model is told of: those that a choice allows, without those that another server would run."""

from __future__ import annotations

from typing import Any

import pytest

import echo_tokenizer
from server_harness import LocalServer
from server_requests import CHAT, error_of, run, user

NAMES = ("look", "hear")
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]
OWN = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]
SEARCHES = [
    {"type": kind, "name": kind.rpartition("_")[0]}
    for kind in ("web_search_20250305", "web_search_20260209", "web_fetch_20250910", "tool_search_tool_bm25_20251119")
]


def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tools that the newest prompt has."""
    seen: list[str] = []

    def noted(self: echo_tokenizer.EchoTokenizer, messages: list[Any], tools: Any = (), **_: Any) -> str:
        seen[:] = [tool["function"]["name"] for tool in tools]
        return str(messages[-1]["content"])

    monkeypatch.setattr(echo_tokenizer.EchoTokenizer, "apply_chat_template", noted)
    return seen


def chat(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return {"messages": user("x"), "tools": FUNCTIONS, "tool_choice": choice, "max_tokens": 4}


def responses(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names] + [{"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
    return {"input": "x", "tools": FLAT, "tool_choice": choice, "max_output_tokens": 16}


@pytest.mark.parametrize("path,ask", [(CHAT, chat), ("/v1/responses", responses)])
def test_a_model_is_told_of_allowed_tools_alone(monkeypatch, path, ask):
    seen = told(monkeypatch)

    async def scenario(server: LocalServer):
        response = await server.post(path, **ask("auto", "hear"))
        assert response.status_code == 200, response.text
        assert seen == ["hear"]
        if path == "/v1/responses":
            assert response.json()["tool_choice"] == ask("auto", "hear")["tool_choice"]
        assert error_of(await server.post(path, **ask("required", "hear")), 400)["code"] == "not_available"
        error = error_of(await server.post(path, **ask("auto", "taste")), 400)
        assert error["param"] == "tool_choice" and "'taste'" in error["message"]
        error = error_of(await server.post(path, **ask("required")), 400)
        assert error["param"] == "tool_choice" and "no tools" in error["message"]

    run(scenario, tool_call_parser="hermes")


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: search["type"])
def test_tools_that_anthropic_runs_are_left_out_and_named(monkeypatch, search):
    seen = told(monkeypatch)
    asked = {"messages": user("x"), "tools": [search, *OWN], "max_tokens": 4}

    async def scenario(server: LocalServer):
        response = await server.post("/v1/messages", **asked)
        assert response.status_code == 200, response.text
        assert response.headers["x-tandem-ignored"] == "tools[0]"
        assert seen == [*NAMES]
        del asked["max_tokens"]
        counted = await server.post("/v1/messages/count_tokens", **asked)
        assert counted.headers["x-tandem-ignored"] == "tools[0]" and counted.json()["input_tokens"] > 0

    run(scenario, tool_call_parser="hermes")


def test_tokens_of_a_response_are_counted():
    async def scenario(server: LocalServer):
        body = {"input": [{"role": "user", "content": "xyz"}], "tools": [*FLAT, {"type": "web_search"}]}
        counted = await server.post("/v1/responses/input_tokens", **body)
        assert counted.status_code == 200, counted.text
        answer = await server.post("/v1/responses", **body, max_output_tokens=16)
        expected = {"object": "response.input_tokens", "input_tokens": answer.json()["usage"]["input_tokens"]}
        assert counted.json() == expected and counted.headers["x-tandem-ignored"] == "tools[2]"
        later = {"input": "and", "previous_response_id": answer.json()["id"]}
        assert (await server.post("/v1/responses/input_tokens", **later)).json()["input_tokens"] > 3
        assert error_of(await server.post("/v1/responses/input_tokens", input=[]), 400)["param"] == "input"

    run(scenario, tool_call_parser="hermes")


LOOSE = {
    "type": "object", "required": ["tags"],
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "a b": {"not": {}}},
}  # fmt: skip
STRICT: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: (
        {"messages": user("x"), "max_tokens": 4, "tools": [
            FUNCTIONS[0], {"type": "function", "function": {"name": "f", "parameters": LOOSE, "strict": True}}]},
        "tools[1].function.parameters",
    ),
    "/v1/responses": (
        {"input": "x", "max_output_tokens": 16, "tools": [
            FLAT[0], {"type": "function", "name": "f", "parameters": LOOSE, "strict": True}]},
        "tools[1].parameters",
    ),
    "/v1/messages": (
        {"messages": user("x"), "max_tokens": 4, "tools": [
            OWN[0], {"name": "f", "input_schema": LOOSE, "strict": True}]},
        "tools[1].input_schema",
    ),
    "/api/chat": (
        {"messages": user("x"), "stream": False, "tools": [
            FUNCTIONS[0], {"type": "function", "function": {"name": "f", "parameters": LOOSE, "strict": True}}]},
        "tools[1].function.parameters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", STRICT)
def test_what_a_strict_tool_cannot_be_held_to_is_named(path: str):
    asked, where = STRICT[path]

    async def scenario(server: LocalServer):
        response = await server.post(path, **asked)
        assert response.status_code == 200, response.text
        named = set(response.headers["x-tandem-ignored"].split(", "))
        assert named == {f"{where}.properties.tags.uniqueItems", f"{where}.properties.a_b.not"}

    run(scenario, tool_call_parser="hermes")
