"""OpenAI's chat, in-process over ASGI, on the real engine with the echo model."""

from __future__ import annotations

import pytest

from server_harness import LocalServer
from server_requests import CHAT, events, run, user


def test_chat_answers_with_usage():
    async def scenario(server: LocalServer):
        response = await server.post(CHAT, messages=user("Hello"), model="echo")
        assert response.status_code == 200
        body = response.json()
        assert body["object"] == "chat.completion" and body["model"] == "echo"
        (choice,) = body["choices"]
        assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "Hello"
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == 6
        assert body["usage"]["completion_tokens"] == 6  # five letters and the end token
        assert body["usage"]["total_tokens"] == 12

    run(scenario)


def test_chat_stream_equals_the_whole_answer():
    async def scenario(server: LocalServer):
        response = await server.post(
            CHAT, messages=user("Grüße 😀!"), stream=True, stream_options={"include_usage": True}
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response.text)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        assert text == "Grüße 😀!"
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
        assert all(c["usage"] is None for c in chunks[:-1])
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 14

    run(scenario)


def test_stream_without_usage_does_not_mention_it():
    async def scenario(server: LocalServer):
        chunks = events((await server.post(CHAT, messages=user("ab"), stream=True)).text)
        assert all("usage" not in chunk for chunk in chunks)

    run(scenario)


def test_chat_n_answers_and_logprobs():
    async def scenario(server: LocalServer):
        response = await server.post(
            CHAT, messages=user("xyz"), n=3, temperature=0, logprobs=True, top_logprobs=2
        )
        choices = response.json()["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2]
        for choice in choices:
            assert choice["message"]["content"] == "xyz"
            first = choice["logprobs"]["content"][0]
            assert first["token"] == "x" and first["bytes"] == [120] and -0.1 < first["logprob"] <= 0
            assert len(first["top_logprobs"]) == 2 and first["top_logprobs"][0]["token"] == "x"
        assert response.json()["usage"]["completion_tokens"] == 12

    run(scenario)


def test_token_ids_as_vllm_tells_them():
    """Of the prompt in an answer's first chunk; of the answer beside their text, the end token included."""

    async def scenario(server: LocalServer):
        asked = {"messages": user("hello"), "n": 2, "temperature": 0, "return_token_ids": True}
        whole = (await server.post(CHAT, **asked)).json()
        prompt = whole["prompt_token_ids"]
        assert len(prompt) == whole["usage"]["prompt_tokens"]
        assert [c["token_ids"] for c in whole["choices"]] == [[*b"hello", 256]] * 2
        chunks = events((await server.post(CHAT, **asked, stream=True)).text)
        said: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            said[choice["index"]] += choice.get("token_ids", [])
            assert ("prompt_token_ids" in chunk) == (choice["delta"].get("role") == "assistant")
            assert chunk.get("prompt_token_ids", prompt) == prompt
        assert said == {0: [*b"hello", 256], 1: [*b"hello", 256]}
        silent = (await server.post(CHAT, messages=user("hello"), stream=True)).text
        assert "token_ids" not in silent and "token_ids" not in (await server.post(CHAT, messages=user("x"))).text

    run(scenario)


def test_chat_stream_with_n_and_logprobs_loses_nothing():
    async def scenario(server: LocalServer):
        response = await server.post(
            CHAT, messages=user("hello"), n=2, stream=True, logprobs=True, temperature=0
        )
        texts, tokens = {0: "", 1: ""}, {0: "", 1: ""}
        for chunk in events(response.text):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            for entry in (choice["logprobs"] or {"content": []})["content"]:
                tokens[choice["index"]] += entry["token"]
        assert texts == {0: "hello", 1: "hello"}
        assert tokens == {0: "hello<256>", 1: "hello<256>"}

    run(scenario)


@pytest.mark.parametrize("stop", ["lo", ["zz", "lo"]])
def test_stop_strings(stop):
    async def scenario(server: LocalServer):
        body = (await server.post(CHAT, messages=user("hello world"), stop=stop)).json()
        assert body["choices"][0]["message"]["content"] == "hel"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["matched_stop"] == "lo"

    run(scenario)


def test_stop_token_ids_and_limits():
    async def scenario(server: LocalServer):
        body = (await server.post(CHAT, messages=user("hello"), stop_token_ids=[108])).json()
        assert body["choices"][0]["message"]["content"].startswith("he")
        assert body["choices"][0]["matched_stop"] == 108
        for name in ("max_tokens", "max_completion_tokens"):
            body = (await server.post(CHAT, messages=user("hello"), **{name: 3})).json()
            assert body["choices"][0]["message"]["content"] == "hel"
            assert body["choices"][0]["finish_reason"] == "length"

    run(scenario)


def test_text_parts_are_joined_and_developer_is_system():
    async def scenario(server: LocalServer):
        parts = [{"type": "text", "text": "foo"}, {"type": "text", "text": "bar"}]
        messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
        body = (await server.post(CHAT, messages=messages)).json()
        assert body["choices"][0]["message"]["content"] == "foobar"

    run(scenario)


def test_unknown_fields_are_ignored_and_named():
    async def scenario(server: LocalServer):
        response = await server.post(CHAT, messages=user("a"), store=True, frobnicate={"x": [1]})
        assert response.status_code == 200
        assert response.headers["x-tandem-ignored"] == "store, frobnicate"

    run(scenario)
