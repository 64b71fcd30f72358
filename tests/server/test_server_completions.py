"""OpenAI's text completions, in-process over ASGI, on the real engine with the echo model."""

from __future__ import annotations

import pytest

from server_harness import LocalServer
from server_requests import events, run


def test_completion_prompt_forms():
    async def scenario(server: LocalServer):
        for prompt, texts in [
            ("abc", ["abc"]),
            (["abc", "de"], ["abc", "de"]),
            ([97, 98, 257], ["ab"]),
            ([[97, 257], [98, 257]], ["a", "b"]),
        ]:
            body = (await server.post("/v1/completions", prompt=prompt)).json()
            assert [c["text"] for c in body["choices"]] == texts
            assert [c["index"] for c in body["choices"]] == list(range(len(texts)))

    run(scenario)


def test_completion_batch_with_n_streams_each_answer():
    async def scenario(server: LocalServer):
        response = await server.post(
            "/v1/completions", prompt=["abc", "xy"], n=2, stream=True, temperature=0,
            stream_options={"include_usage": True},
        )  # fmt: skip
        texts = dict.fromkeys(range(4), "")
        chunks = events(response.text)
        for chunk in chunks[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == {0: "abc", 1: "abc", 2: "xy", 3: "xy"}
        assert chunks[-1]["usage"]["prompt_tokens"] == 7
        assert chunks[-1]["usage"]["completion_tokens"] == 14

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_tell_token_ids_as_vllm_does(stream):
    async def scenario(server: LocalServer):
        asked = {"prompt": ["abc", [120, 257]], "temperature": 0, "stream": stream}
        response = await server.post("/v1/completions", **asked, return_token_ids=True)
        bodies = events(response.text) if stream else [response.json()]
        prompts: dict[int, list[list[int]]] = {0: [], 1: []}
        answers: dict[int, list[int]] = {0: [], 1: []}
        for choice in (choice for body in bodies for choice in body["choices"]):
            answers[choice["index"]] += choice["token_ids"]
            prompts[choice["index"]] += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
        assert prompts == {0: [[*b"abc", 257]], 1: [[120, 257]]}
        assert answers == {0: [*b"abc", 256], 1: [*b"x", 256]}
        assert "token_ids" not in (await server.post("/v1/completions", **asked)).text

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_completion_echo_and_logprobs(stream):
    async def scenario(server: LocalServer):
        response = await server.post(
            "/v1/completions", prompt="abc", echo=True, logprobs=1, temperature=0, stream=stream
        )
        choices = (
            [c["choices"][0] for c in events(response.text)] if stream else response.json()["choices"][:1]
        )
        assert "".join(c["text"] for c in choices) == "abcabc"
        parts = [c["logprobs"] for c in choices if c["logprobs"]]
        tokens = [t for p in parts for t in p["tokens"]]
        assert tokens == ["a", "b", "c", "<257>", "a", "b", "c", "<256>"]
        values = [v for p in parts for v in p["token_logprobs"]]
        assert values[0] is None and all(v is not None for v in values[1:])
        assert [t for p in parts for t in p["text_offset"]] == [0, 1, 2, 3, 3, 4, 5, 6]
        assert next(t for p in parts for t in p["top_logprobs"]) is None

    run(scenario)


def test_text_offsets_count_characters_not_tokens():
    async def scenario(server: LocalServer):
        body = (
            await server.post("/v1/completions", prompt="aß€b", echo=True, logprobs=0, temperature=0)
        ).json()
        choice = body["choices"][0]
        assert choice["text"] == "aß€baß€b"
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 6, 6, 6, 7, 8]

    run(scenario)


def test_a_scored_prompt_counts_no_answer_in_a_stream_either():
    async def scenario(server: LocalServer):
        response = await server.post(
            "/v1/completions", prompt="abc", echo=True, logprobs=0, max_tokens=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        assert events(response.text)[-1]["usage"]["completion_tokens"] == 0

    run(scenario)


def test_completion_scores_a_prompt_without_answering():
    async def scenario(server: LocalServer):
        body = (
            await server.post("/v1/completions", prompt="abc", echo=True, logprobs=0, max_tokens=0)
        ).json()
        assert body["choices"][0]["text"] == "abc"
        assert len(body["choices"][0]["logprobs"]["tokens"]) == 4
        assert body["usage"]["completion_tokens"] == 0

    run(scenario)


def test_cached_tokens_are_reported():
    async def scenario(server: LocalServer):
        prompt = "a long prompt that fills pages"
        await server.post("/v1/completions", prompt=prompt)
        body = (await server.post("/v1/completions", prompt=prompt)).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 24
        assert (await server.client.post("/flush_cache")).status_code == 200
        body = (await server.post("/v1/completions", prompt=prompt)).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    run(scenario)
