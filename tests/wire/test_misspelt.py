"""Fields that a body does not have: a misspelt one is refused and the right one is named, as `/generate` does for
`sampling_params`; another server's is ignored and named in the answer's header."""

from __future__ import annotations

from typing import Any

import pytest

from server_harness import LocalServer
from server_requests import CHAT, run, user
from tandem.server.chat.openai.schema import ChatRequest
from tandem.server.fields import misspelt
from tandem.server.responses.schema import ResponsesRequest

ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user("x"), "max_tokens": 4},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": user("x"), "max_tokens": 4},
    "/api/chat": {"messages": user("x"), "stream": False},
}
MISSPELT = {
    CHAT: {"max_token": "max_tokens", "maxTokens": "max_tokens", "temprature": "temperature", "topP": "top_p",
           "toolChoice": "tool_choice", "response_fromat": "response_format"},
    "/v1/completions": {"max_token": "max_tokens", "stream_option": "stream_options"},
    "/v1/responses": {"max_output_token": "max_output_tokens", "instruction": "instructions"},
    "/v1/messages": {"stop_sequence": "stop_sequences"},
    "/api/chat": {"options.num_predic": "num_predict", "keepAlive": "keep_alive"},
}  # fmt: skip
OTHERS = [
    "metadata", "user", "store", "provider", "models", "mode", "speed", "reasoning_format", "return_tokens",
    "cache_prompt", "temperature_last", "repetition_penalty_range", "parse_tool_calls", "max_input_tokens", "id_slot",
]  # fmt: skip


@pytest.mark.parametrize("path", MISSPELT)
def test_a_misspelt_field_names_the_nearest(path: str):
    async def scenario(server: LocalServer):
        for name, meant in MISSPELT[path].items():
            field = {"options": {name.partition(".")[2]: 5}} if "." in name else {name: 5}
            response = await server.post(path, **ASKED[path] | field)
            assert response.status_code == 400, (name, response.text)
            text = str(response.json()["error"])
            assert f"{name} is not known here; the nearest name is" in text and meant in text
            nothing = {"options": {name.partition(".")[2]: None}} if "." in name else {name: None}
            assert (await server.post(path, **ASKED[path] | nothing)).status_code == 200

    run(scenario)


def test_another_servers_field_is_ignored_and_named():
    async def scenario(server: LocalServer):
        for name in OTHERS:
            response = await server.post(CHAT, **ASKED[CHAT], **{name: 5})
            assert response.status_code == 200, (name, response.text)
            assert response.headers["x-tandem-ignored"] == name

    run(scenario)


def test_another_name_of_a_field_is_told():
    async def scenario(server: LocalServer):
        for name, meant in {"stop_sequences": "stop", "stop_tokens": "stop_token_ids"}.items():
            response = await server.post(CHAT, **ASKED[CHAT], **{name: ["x"]})
            assert response.status_code == 400 and f"give {meant}" in response.json()["error"]["message"]

    run(scenario)


@pytest.mark.parametrize("name,kind,meant", [
    ("max_token", ChatRequest, "max_tokens"),
    ("MAX-TOKENS", ChatRequest, "max_tokens"),
    ("max_tokns", ChatRequest, "max_tokens"),
    ("seeds", ChatRequest, None),  # of short names only the case may be wrong
    ("Seed", ChatRequest, "seed"),
    ("model_", ChatRequest, None),
    ("max_token", ResponsesRequest, None),
    ("messages[].contents", ChatRequest, None),
    ("x" * 10_000, ChatRequest, None),
    ("max_token", None, None),
])  # fmt: skip
def test_what_counts_as_misspelt(name, kind, meant):
    assert misspelt(name, kind) == meant
