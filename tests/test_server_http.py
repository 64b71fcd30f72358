"""Every dialect and every refusal, in-process over ASGI, on the real engine with the echo model."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from pathlib import Path

import pytest

import echo_engine
from echo_tokenizer import EOS, EchoTokenizer
from server_harness import LocalServer, local_server
from tandem.engine import limits as engine_limits
from tandem.server import limits
from tandem.server.limits import MAX_BODY_BYTES

CHAT = "/v1/chat/completions"


def run(scenario, **flags):
    """One scenario on one fresh server; afterwards no answer may be left over."""

    async def go():
        async with local_server(**flags) as server:
            await asyncio.wait_for(scenario(server), 60)
            assert server.state.client.open_answers == 0

    asyncio.run(go())


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def events(text: str) -> list:
    """Server-sent events → decoded JSON; the last must be [DONE]."""
    frames = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


# --- chat


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


# --- completions


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
        assert [t for p in parts for t in p["text_offset"]] == [0, 1, 2, 3, 8, 9, 10, 11]
        assert next(t for p in parts for t in p["top_logprobs"]) is None

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
        assert (await server.client.get("/flush_cache")).status_code == 200
        body = (await server.post("/v1/completions", prompt=prompt)).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    run(scenario)


# --- SGLang


def test_generate():
    async def scenario(server: LocalServer):
        body = (await server.post("/generate", text="hello", rid="mine")).json()
        assert body["text"] == "hello"
        assert body["output_ids"] == [*b"hello", EOS]
        meta = body["meta_info"]
        assert meta["id"] == "mine" and meta["finish_reason"]["type"] == "stop"
        assert meta["prompt_tokens"] == 6 and meta["completion_tokens"] == 6
        batch = (
            await server.post("/generate", text=["ab", "cd"], sampling_params={"max_new_tokens": 1})
        ).json()
        assert [b["text"] for b in batch] == ["a", "c"]
        assert batch[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
        ids = (await server.post("/generate", input_ids=[[97, 257], [98, 257]])).json()
        assert [b["text"] for b in ids] == ["a", "b"]
        several = (await server.post("/generate", text="ab", sampling_params={"n": 2})).json()
        assert [b["text"] for b in several] == ["ab", "ab"]

    run(scenario)


def test_generate_stream_is_cumulative():
    async def scenario(server: LocalServer):
        chunks = events((await server.post("/generate", text="hello", stream=True)).text)
        texts = [c["text"] for c in chunks]
        assert texts[-1] == "hello" and all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"
        assert all(c["meta_info"]["finish_reason"] is None for c in chunks[:-1])

    run(scenario)


def test_generate_logprobs():
    async def scenario(server: LocalServer):
        body = (
            await server.post(
                "/generate", text="abc", return_logprob=True, logprob_start_len=0, top_logprobs_num=2,
                return_text_in_logprobs=True, sampling_params={"temperature": 0},
            )
        ).json()  # fmt: skip
        meta = body["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == [97, 98, 99, 257]
        assert meta["input_token_logprobs"][0][0] is None
        assert [entry[2] for entry in meta["output_token_logprobs"]] == ["a", "b", "c", "<256>"]
        assert len(meta["output_top_logprobs"][0]) == 2
        only_output = await server.post("/generate", text="abc", return_logprob=True)
        assert only_output.json()["meta_info"]["input_token_logprobs"] == []

    run(scenario)


def test_abort_by_id_ends_the_stream():
    async def scenario(server: LocalServer):
        sampling = {"max_new_tokens": 3000, "ignore_eos": True}
        task = asyncio.create_task(
            server.post("/generate", input_ids=[97], rid="long", sampling_params=sampling)
        )
        while not server.state.client.stats.running:
            await asyncio.sleep(0.01)
        duplicate = await server.post("/generate", text="x", rid="long")
        assert error_of(duplicate, 400)["param"] == "rid"
        assert (await server.post("/abort_request", rid="long")).json() == {"aborted": True}
        body = (await task).json()
        assert body["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await server.post("/abort_request", rid="long")).json() == {"aborted": False}
        await pages_are_back(server)

    run(scenario)


async def pages_are_back(server: LocalServer) -> None:
    """The engine's last report says: nothing runs, every page is available."""
    for _ in range(500):
        await asyncio.sleep(0.005)
        stats = (await server.client.get("/get_server_info")).json()["stats"]
        if stats["running"] == stats["waiting"] == 0 and stats["pages_free"] == stats["pages_total"]:
            return
    raise AssertionError(stats)


# --- the server itself


def test_information_routes():
    async def scenario(server: LocalServer):
        get = server.client.get
        assert (await get("/health")).status_code == 200
        assert (await get("/health_generate")).status_code == 200
        assert (await get("/v1/models")).json()["data"][0]["id"] == "echo"
        assert (await get("/v1/models/echo")).json()["max_model_len"] == echo_engine.CONTEXT
        assert (await get("/get_model_info")).json()["is_generation"] is True
        info = (await get("/get_server_info")).json()
        assert info["plan"]["num_pages"] == echo_engine.PAGES and "api_key" not in info
        metrics = (await get("/metrics")).text
        assert (
            "tandem_engine_up 1.0" in metrics
            and 'tandem_answers_total{finish_reason="length"} 1.0' in metrics
        )
        assert "Tandem" in (await get("/")).text

    run(scenario)


def test_api_key():
    async def scenario(server: LocalServer):
        assert (await server.client.get("/health")).status_code == 200
        assert error_of(await server.client.get("/v1/models"), 401)["code"] == "invalid_api_key"
        wrong = {"Authorization": "Bearer nope"}
        error_of(await server.client.get("/v1/models", headers=wrong), 401)
        right = {"Authorization": "Bearer s3cret"}
        assert (await server.client.get("/v1/models", headers=right)).status_code == 200

    run(scenario, api_key="s3cret")


def test_overload_and_drain(monkeypatch):
    async def scenario(server: LocalServer):
        monkeypatch.setattr("tandem.server.state.MAX_OPEN_ANSWERS", 0)
        response = await server.post(CHAT, messages=user("a"))
        assert error_of(response, 429)["code"] == "overloaded" and response.headers["retry-after"] == "1"
        assert (await server.client.get("/health")).status_code == 200  # busy is not ill
        server.state.draining = True
        error_of(await server.post(CHAT, messages=user("a")), 503)
        error_of(await server.client.get("/health"), 503)

    run(scenario)


def test_every_answer_of_a_batch_counts(monkeypatch):
    async def scenario(server: LocalServer):
        monkeypatch.setattr("tandem.server.state.MAX_OPEN_ANSWERS", 8)
        many = await server.post("/v1/completions", prompt=["a", "b", "c"], n=3)
        assert error_of(many, 400)["param"] == "n"
        sampling = {"max_new_tokens": 3000, "ignore_eos": True, "n": 6}
        long = asyncio.create_task(
            server.post("/generate", input_ids=[97], rid="long", sampling_params=sampling)
        )
        while not server.state.client.open_answers:
            await asyncio.sleep(0.01)
        error_of(await server.post("/v1/completions", prompt=["a", "b", "c"]), 429)
        assert (await server.post("/v1/completions", prompt=["a", "b"])).status_code == 200
        await server.post("/abort_request", rid="long")
        await long

    run(scenario)


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/generate", "text")])
def test_a_batch_is_tokenised_off_the_event_loop_as_a_whole(monkeypatch, path, field):
    threads: list[int] = []
    encode = EchoTokenizer.encode

    def noted(self, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special_tokens)

    async def scenario(server: LocalServer):
        monkeypatch.setattr(EchoTokenizer, "encode", noted)
        texts = [f"{i:04}" * 250 for i in range(21)]  # each is short
        response = await server.post(path, **{field: texts})
        assert response.status_code == 200
        assert len(threads) == 21 and threading.get_ident() not in threads

    run(scenario)


def test_a_failing_step_fails_its_request_only():
    async def scenario(server: LocalServer):
        other = asyncio.create_task(server.post(CHAT, messages=user("fine " * 100)))
        await asyncio.sleep(0.05)
        response = await server.post(CHAT, messages=user("raise! now"))
        assert error_of(response, 503)
        assert (await other).status_code in (200, 503)  # 503 if it was in the very same step
        assert (await server.post(CHAT, messages=user("next"))).status_code == 200

    run(scenario)


# --- refusals

BAD_CHAT = {
    "empty messages": ({"messages": []}, 400),
    "no messages": ({}, 400),
    "messages is a string": ({"messages": "hi"}, 400),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, 400),
    "tool role": ({"messages": [{"role": "tool", "content": "x"}]}, 400),
    "null content": ({"messages": [{"role": "user", "content": None}]}, 400),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
    ),
    "unknown model": ({"model": "gpt-99"}, 404),
    "n = 0": ({"n": 0}, 400),
    "n is huge": ({"n": 10**18}, 400),
    "n is a string": ({"n": "3"}, 400),
    "negative max_tokens": ({"max_tokens": -1}, 400),
    "max_tokens beyond the context": ({"max_tokens": 10**6}, 400),
    "temperature 1e9": ({"temperature": 1e9}, 400),
    "negative temperature": ({"temperature": -0.1}, 400),
    "top_p 0": ({"top_p": 0}, 400),
    "huge integer": ({"seed": 10**40}, 400),
    "10,000 stop strings": ({"stop": ["x"] * 10_000}, 400),
    "empty stop string": ({"stop": ""}, 400),
    "logit_bias key": ({"logit_bias": {"abc": 1}}, 400),
    "logit_bias id": ({"logit_bias": {"999999": 1}}, 400),
    "logit_bias value": ({"logit_bias": {"1": 1000}}, 400),
    "stop token": ({"stop_token_ids": [10**6]}, 400),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400),
    "response_format": ({"response_format": {"type": "json_object"}}, 400),
    "regex": ({"regex": "a+"}, 400),
    "top_logprobs alone": ({"top_logprobs": 2}, 400),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, 400),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, 400),
    "prompt too long": ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400),
    "template kwargs": ({"chat_template_kwargs": {"messages": []}}, 400),
}


@pytest.mark.parametrize("name", BAD_CHAT)
def test_bad_chat_requests(name):
    body, status = BAD_CHAT[name]

    async def scenario(server: LocalServer):
        for stream in (False,) if name == "stream_options alone" else (False, True):
            fields = ({"messages": user("x"), "stream": stream} if name != "no messages" else {}) | body
            error_of(await server.client.post(CHAT, json=fields), status)

    run(scenario)


BAD_BYTES = {
    "not JSON": b"{messages: []}",
    "empty": b"",
    "a list": b"[]",
    "NaN": b'{"messages": [], "temperature": NaN}',
    "Infinity": b'{"messages": [], "temperature": Infinity}',
    "1e999": b'{"messages": [], "temperature": 1e999}',
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "surrogates swapped": b'{"messages": [{"role": "user", "content": "\\udc00\\ud800"}]}',
    "deep nesting": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long integer": b'{"messages": [], "seed": 1' + b"0" * 5000 + b"}",
    "surrogate key": b'{"\\ud800": 1, "messages": [{"role": "user", "content": "a"}]}',
}


@pytest.mark.parametrize("name", BAD_BYTES)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate", "/abort_request"])
def test_bad_bytes(name, path):
    async def scenario(server: LocalServer):
        error_of(await server.client.post(path, content=BAD_BYTES[name]), 400)

    run(scenario)


BAD_COMPLETIONS = {
    "no prompt": {},
    "empty prompt": {"prompt": ""},
    "empty list": {"prompt": []},
    "mixed": {"prompt": [1, "a"]},
    "empty ids": {"prompt": [[]]},
    "id beyond the vocabulary": {"prompt": [10**6]},
    "echo of a bad id": {"prompt": [10**6], "echo": True},
    "negative id": {"prompt": [-1]},
    "1000 prompts": {"prompt": ["a"] * 1000},
    "suffix": {"prompt": "a", "suffix": "b"},
    "best_of": {"prompt": "a", "best_of": 3},
    "max_tokens 0": {"prompt": "a", "max_tokens": 0},
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_completions(name):
    async def scenario(server: LocalServer):
        error_of(await server.client.post("/v1/completions", json=BAD_COMPLETIONS[name]), 400)

    run(scenario)


BAD_GENERATE = {
    "nothing": {},
    "both": {"text": "a", "input_ids": [1]},
    "params count": {"text": ["a", "b"], "sampling_params": [{}]},
    "same rids": {"text": ["a", "b"], "rid": ["x", "x"]},
    "regex": {"text": "a", "sampling_params": {"regex": "a"}},
    "temperature": {"text": "a", "sampling_params": {"temperature": 1e9}},
    "image": {"text": "a", "image_data": "x"},
    "rid type": {"text": "a", "rid": 3},
    "start type": {"text": "a", "logprob_start_len": "0"},
}


@pytest.mark.parametrize("name", BAD_GENERATE)
def test_bad_generate(name):
    async def scenario(server: LocalServer):
        error_of(await server.client.post("/generate", json=BAD_GENERATE[name]), 400)

    run(scenario)


def test_routes_and_methods():
    async def scenario(server: LocalServer):
        assert error_of(await server.client.get("/nope"), 404)["code"] == "unknown_route"
        assert error_of(await server.client.get(CHAT), 405)["code"] == "method_not_allowed"
        assert error_of(await server.client.get("/v1/models/other"), 404)["code"] == "model_not_found"
        error_of(await server.client.post("/abort_request", json={}), 400)

    run(scenario)


@pytest.mark.parametrize("declared", [True, False])
def test_a_huge_body_is_refused(declared):
    async def scenario(server: LocalServer):
        piece = b" " * (1 << 20)

        async def pieces():
            for _ in range(MAX_BODY_BYTES // len(piece) + 4):
                yield piece

        headers = {"content-length": str(100 << 20)} if declared else {}
        response = await server.client.post(CHAT, content=pieces(), headers=headers)
        assert error_of(response, 413)["code"] == "body_too_large"

    run(scenario)


def test_the_documentation_says_what_is_so():
    """docs/http.md names every route and the limits that the code has."""
    text = (Path(__file__).parent.parent / "docs" / "http.md").read_text()

    async def scenario(server: LocalServer):
        for path in server.app.openapi()["paths"]:
            assert (
                path == "/" or path.replace("/v1/models/{model_id}", "/v1/models/{id}").split("{")[0] in text
            )

    run(scenario)
    for number in (
        limits.MAX_PROMPTS, limits.MAX_MESSAGES, limits.MAX_TOP_LOGPROBS, limits.MAX_OPEN_ANSWERS,
        engine_limits.MAX_ANSWERS,
        engine_limits.MAX_STOP_STRINGS, engine_limits.MAX_STOP_CHARS, engine_limits.MAX_STOP_TOKENS,
        engine_limits.MAX_LOGIT_BIAS,
    ):  # fmt: skip
        assert f"{number:,}" in text, number
    assert f"{limits.MAX_BODY_BYTES >> 20} MiB" in text and f"{limits.DRAIN_SECONDS:g} seconds" in text
