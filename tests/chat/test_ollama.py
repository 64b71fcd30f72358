"""Ollama's routes with Ollama's own client. The echo model says what the last user says."""

from __future__ import annotations

import json
import math
from typing import Any

import ollama
import pytest

import tandem
from echo_tokenizer import EchoTokenizer
from server_harness import LocalServer
from server_requests import run, user
from tandem.errors import EngineError
from tandem.server.ollama.writer import OllamaWriter
from tool_outputs import ARGUMENTS, OPENAI_TOOLS, OUTPUTS

HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
THOUGHT = "<think>\nHm, hm.\n</think>\n\n"


def client_of(server: LocalServer) -> ollama.AsyncClient:
    client = ollama.AsyncClient("http://tandem")
    client._client = server.client  # it has no argument for that
    return client


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_chat():
    async def scenario(server: LocalServer):
        client = client_of(server)
        answer = await client.chat("any", user(THOUGHT + OUTPUTS["hermes"]), tools=OPENAI_TOOLS)
        message = answer.message
        assert message.thinking == "Hm, hm." and message.content == "Hm." and message.role == "assistant"
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert calls == [("weather", ARGUMENTS), ("now", {})]
        assert answer.done and answer.done_reason == "stop" and answer.model == "echo"
        assert answer.prompt_eval_count > 100 and answer.eval_count > 100 and answer.total_duration > 0

    run(scenario, **HERMES)


def test_streamed_is_whole():
    async def scenario(server: LocalServer):
        body = {"messages": user(THOUGHT + OUTPUTS["hermes"]), "tools": OPENAI_TOOLS}
        response = await server.post("/api/chat", **body)
        assert response.headers["content-type"] == "application/x-ndjson"
        *chunks, last = lines(response.text)
        assert all(chunk["done"] is False for chunk in chunks) and last["done"] is True
        assert len(chunks) > 10
        said = [chunk["message"] for chunk in chunks]
        whole = (await server.post("/api/chat", **body, stream=False)).json()["message"]
        assert "".join(m["content"] for m in said) == whole["content"] == "Hm."
        assert "".join(m.get("thinking", "") for m in said) == whole["thinking"] == "Hm, hm."
        calls = [call["function"] for m in said for call in m.get("tool_calls", ())]
        assert calls == [call["function"] for call in whole["tool_calls"]]
        assert [call["index"] for call in calls] == [0, 1]

    run(scenario, **HERMES)


def test_generate():
    async def scenario(server: LocalServer):
        client = client_of(server)
        assert (await client.generate("any", "Hello")).response == "Hello"
        cut = await client.generate("any", "Hello", options={"num_predict": 3})
        assert cut.response == "Hel" and cut.done_reason == "length" and cut.eval_count == 3
        parts = [part.response async for part in await client.generate("any", "Hello", stream=True)]
        assert "".join(parts) == "Hello" and len(parts) == 6
        assert (await client.generate("any", "Hello", raw=True)).response == "Hello"
        stopped = await client.generate("any", "one, two", options={"stop": [","]})
        assert stopped.response == "one"
        loaded = await client.generate("any")
        assert loaded.done and loaded.done_reason == "load"

    run(scenario)


def test_results_are_those_of_the_calls_before(monkeypatch):
    seen: list[dict[str, Any]] = []

    def noted(self: EchoTokenizer, messages: list[dict[str, Any]], **variables: Any) -> str:
        seen[:] = messages
        return str(messages[-1]["content"])

    monkeypatch.setattr(EchoTokenizer, "apply_chat_template", noted)

    async def scenario(server: LocalServer):
        client = client_of(server)
        answer = await client.chat("any", user(OUTPUTS["hermes"]), tools=OPENAI_TOOLS)
        results = [
            {"role": "tool", "tool_name": "now", "content": "noon"},
            {"role": "tool", "tool_name": "weather", "content": "rain"},
        ]
        again = await client.chat("any", [*user("x"), answer.message, *results, *user("Fine.")])
        assert again.message.content == "Fine."
        ids = {call["function"]["name"]: call["id"] for call in seen[1]["tool_calls"]}
        assert [(m["name"], m["tool_call_id"]) for m in seen[2:4]] == [
            ("now", ids["now"]), ("weather", ids["weather"]),
        ]  # fmt: skip

    run(scenario, **HERMES)


def test_what_clients_ask_first():
    async def scenario(server: LocalServer):
        client = client_of(server)
        [model] = (await client.list()).models
        assert model.model == "echo"
        assert [one.model for one in (await client.ps()).models] == ["echo"]
        shown = await client.show("echo")
        assert set(shown.capabilities) == {"completion", "tools", "thinking"}
        assert shown.modelinfo["echo.context_length"] == 4096
        assert shown.modelinfo["general.basename"] == "echo"  # the name that VS Code shows

    run(scenario, **HERMES)


@pytest.mark.parametrize(("client", "least"), [("VS Code", (0, 6, 4)), ("codex --oss", (0, 13, 4))])
def test_the_version_is_that_of_ollamas_interface(client, least):
    """Clients that want /v1/responses, or tools, refuse a server whose version is lower."""

    async def scenario(server: LocalServer):
        version = (await server.client.get("/api/version")).json()["version"]
        assert tuple(map(int, version.split("."))) >= least, client
        assert (await server.client.get("/version")).json()["version"] == tandem.__version__

    run(scenario)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "messages[0].images"),
    "mirostat": ({"options": {"mirostat": 2}}, "options.mirostat"),
    "temperature": ({"options": {"temperature": -1}}, "options.temperature"),
    "format": ({"format": "xml"}, "format"),
    "think": ({"think": True}, "think"),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
}


@pytest.mark.parametrize("name", BAD)
def test_complaints_name_the_field(name):
    fields, where = BAD[name]

    async def scenario(server: LocalServer):
        response = await server.post("/api/chat", **{"messages": user("x")} | fields)
        assert response.status_code == 400 and set(response.json()) == {"error"}
        assert where in response.json()["error"]
        with pytest.raises(ollama.ResponseError, match="embeddings"):
            await client_of(server).embed("any", "x")

    run(scenario, reasoning_parser="none")


def test_options_that_change_nothing_are_named():
    async def scenario(server: LocalServer):
        options = {"num_ctx": 8192, "num_gpu": 99, "temperature": 0.5}
        response = await server.post("/api/chat", messages=user("x"), options=options, keep_alive="5m")
        assert response.headers["x-tandem-ignored"] == "options.num_ctx, options.num_gpu, keep_alive"
        stays = await server.post("/api/chat", messages=user("x"), keep_alive=-1)
        assert "x-tandem-ignored" not in stays.headers

    run(scenario)


def test_a_model_that_stays_for_good_is_unloaded_by_an_empty_prompt_alone():
    """`ollama stop` asks for that, with either route. Without --sleep-idle-seconds clients do not say how long it
    stays."""

    async def scenario(server: LocalServer):
        sleep = server.state.client.sleep
        for path, nothing in (("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})):
            for zero in (0, 0.0, "0", "0s", "0m0s", "-0s"):
                unloaded = await server.post(path, **nothing, keep_alive=zero)
                assert unloaded.json()["done_reason"] == "unload" and sleep.seconds_left == 0, zero
                assert "x-tandem-ignored" not in unloaded.headers
                sleep.keep(math.inf)
            for more in (None, -1, 300, "5m", "10s", "-1m"):
                loaded = await server.post(path, **nothing, keep_alive=more)
                assert loaded.json()["done_reason"] == "load", more
                assert loaded.headers.get("x-tandem-ignored") == (
                    None if more is None or str(more).startswith("-") else "keep_alive"
                )
            wrong = await server.post(path, **nothing, options={"frequency_penalty": 101})
            assert wrong.status_code == 400 and "options.frequency_penalty" in wrong.json()["error"]
            wrong = await server.post(path, **nothing, keep_alive="soon")
            assert wrong.status_code == 400 and "keep_alive" in wrong.json()["error"]
        answered = await server.post("/api/generate", prompt="x", keep_alive=0, stream=False)
        assert answered.json()["done_reason"] == "stop" and sleep.seconds_left == math.inf
        assert answered.headers["x-tandem-ignored"] == "keep_alive"

    run(scenario)


def test_a_failing_stream_ends_with_a_line(monkeypatch):
    def died(writer: OllamaWriter) -> bytes:
        raise EngineError("the engine died")

    async def scenario(server: LocalServer):
        monkeypatch.setattr(OllamaWriter, "last", died)
        response = await server.post("/api/chat", messages=user("x"))
        assert lines(response.text)[-1] == {"error": "the engine died"}

    run(scenario)
