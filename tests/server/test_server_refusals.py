"""Every refusal of every dialect has its status and OpenAI's error body."""

from __future__ import annotations

import gzip

import pytest

from server_harness import LocalServer
from server_requests import CHAT, error_of, events, run, user
from tandem.server.limits import MAX_BODY_BYTES

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
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
    "n = 0": ({"n": 0}, 400),
    "n is huge": ({"n": 10**18}, 400),
    "n is a string": ({"n": "3"}, 400),
    "negative max_tokens": ({"max_tokens": -2}, 400),
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
    "tools of another type": ({"tools": [{"type": "web_search"}]}, 400),
    "a tool's name": ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, 400),
    "a tool twice": ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, 400),
    "a call without tools": ({"tool_choice": "required"}, 400),
    "calls of a user": ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, 400),
    "no switch for thinking": ({"enable_thinking": False, "thinking_token_budget": 9}, 400),
    "template kwargs: tools": ({"chat_template_kwargs": {"tools": []}}, 400),
    "nothing to go on with": ({"continue_final_message": True}, 400),
    "response_format": ({"response_format": {"type": "jason"}}, 400),
    "regex": ({"regex": ["a+"]}, 400),
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
    "too large a number for an unknown field": b'{"messages": [], "tools": 1e999}',
    "unknown field of invalid UTF-8": b'{"text": "x", "prompt": "x", "rid": "", "regex": "\xff\xfe"}',
    "a key of invalid UTF-8": b'{"\xff": 1}',
    "sampling_params that are too large": b'{"text": "x", "sampling_params": {"regex": 1e999}}',
    "millions of lists": b'{"x": [' + b"[]," * 1_000_000 + b"[]]}",
    "millions of keys": b"{" + b",".join(b'"%d": 1' % i for i in range(300_000)) + b"}",
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
    "regex": {"text": "a", "sampling_params": {"regex": "a", "ebnf": "a"}},
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


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, {"messages": user("x" * 5000)}, "messages", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        (CHAT, {"messages": user("x"), "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt", "context_length_exceeded"),
        ("/generate", {"text": "x" * 5000}, "text", "context_length_exceeded"),
        ("/generate", {"input_ids": [10**6]}, "input_ids", "invalid_value"),
        (
            "/generate",
            {"text": "x", "sampling_params": {"max_new_tokens": -1}},
            "max_new_tokens",
            "invalid_value",
        ),
        (
            "/generate",
            {"text": "x", "sampling_params": {"min_new_tokens": 500}},
            "min_new_tokens",
            "invalid_value",
        ),
    ],
)
def test_refusals_use_the_dialect_s_names(path, body, param, code):
    async def scenario(server: LocalServer):
        error = error_of(await server.post(path, **body), 400)
        assert (error["param"], error["code"]) == (param, code)
        assert param in error["message"] or param in ("messages", "prompt", "text", "input_ids")

    run(scenario)


WOULD_CHANGE_THE_ANSWER = {
    CHAT: {
        "function_call": {"name": "f"}, "guided_whitespace_pattern": "x", "bad_words": ["x"], "do_sample": False,
        "best_of": 2,
        "input_ids": [1], "prompt_logprobs": 0, "return_tokens_as_token_ids": True,
        "mirostat": 2,
        "n_predict": 3, "options": {"seed": 1}, "add_special_tokens": True,
        "echo": True, "lora_path": "x", "chat_template": "x", "modalities": ["audio"],
    },
    "/v1/completions": {
        "custom_logit_processor": "a", "use_beam_search": True, "suffix": "x", "chat_template_kwargs": {"x": 1},
        "top_logprobs": 2, "max_completion_tokens": 5, "max_new_tokens": 5, "reasoning_effort": "high",
    },
    "/generate": {"lora_path": "x", "session_params": {"id": "x"}, "input_embeds": [[0.5]], "stop_regex": "x"},
}  # fmt: skip


@pytest.mark.parametrize("path", WOULD_CHANGE_THE_ANSWER)
def test_fields_that_would_change_the_answer_are_refused(path):
    prompt = {CHAT: {"messages": user("x")}, "/v1/completions": {"prompt": "x"}, "/generate": {"text": "x"}}

    async def scenario(server: LocalServer):
        for name, value in WOULD_CHANGE_THE_ANSWER[path].items():
            response = await server.post(path, **prompt[path], **{name: value})
            error = error_of(response, 400)
            assert (error["code"], error["param"]) == ("not_available", name)

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": "x", "n_predict": 3}, "n_predict is not known here: give max_tokens"),
        (CHAT, {"messages": user("x"), "max_new_tokens": 3}, "give max_tokens"),
        ("/generate", {"text": "x", "sampling_params": {"max_tokens": 3}}, "max_new_tokens"),
        ("/generate", {"text": "x", "sampling_params": {"grammar": "root ::= x"}},
         "sampling_params.grammar is not known here: give ebnf"),
        (CHAT, {"messages": user("x"), "repeat_penalty": 1.1}, "give repetition_penalty"),
        (CHAT, {"messages": user("x"), "mirostat": 2}, "mirostat is not available; leave it out"),
    ],
)
def test_another_server_s_name_is_told_ours(path, body, says):
    async def scenario(server: LocalServer):
        assert says in error_of(await server.post(path, **body), 400)["message"]

    run(scenario)


def test_the_same_fields_with_values_that_change_nothing_are_taken():
    async def scenario(server: LocalServer):
        neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "regex": None,
                   "do_sample": True, "best_of": 1, "mirostat": 0, "repeat_penalty": 1.0}  # fmt: skip
        response = await server.post(CHAT, messages=user("x"), **neutral, echo=False, lora_path="")
        assert response.status_code == 200
        response = await server.post("/v1/responses", input="x", top_logprobs=0)  # OpenAI's default
        assert response.status_code == 200

    run(scenario)


WHOLE = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 2.0, "seed": 1e3}, {"prompt": "x", "max_tokens": 2.5}),
    ("/v1/completions", {"prompt": [97.0, 98]}, {"prompt": [97.5]}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2.0}}, {"text": "x", "rid": 1.0}),
    ("/detokenize", {"tokens": [97.0]}, {"tokens": [1e300]}),
    (CHAT, {"messages": user("x"), "top_k": 5.0}, {"messages": user("x"), "top_k": "5"}),
]


@pytest.mark.parametrize(("path", "taken", "refused"), WHOLE)
def test_a_number_without_a_fraction_is_an_integer(path, taken, refused):
    """As in JSON schema, and for languages that have one kind of number. Texts are none."""

    async def scenario(server: LocalServer):
        assert (await server.post(path, **taken)).status_code == 200
        assert error_of(await server.post(path, **refused), 400)["code"] == "invalid_type"
        many = {"prompt": [97.0] * 30_000}  # it is not looked at each of millions
        assert error_of(await server.post("/v1/completions", **many), 400)

    run(scenario)


def test_sampling_params_must_be_spelt_right():
    async def scenario(server: LocalServer):
        for given, param in [
            ({"max_tokens": 3}, "sampling_params.max_tokens"),
            ([{"temprature": 0}], "sampling_params.temprature"),
            ({"stop_regex": "a|b"}, "sampling_params.stop_regex"),
        ]:
            text = ["x"] if isinstance(given, list) else "x"
            error = error_of(await server.post("/generate", text=text, sampling_params=given), 400)
            assert error["param"] == param
        assert (
            "'temperature'"
            in error_of(await server.post("/generate", text="x", sampling_params={"temprature": 0}), 400)[
                "message"
            ]
        )
        harmless = {"spaces_between_special_tokens": True, "regex": None}
        response = await server.post("/generate", text="x", sampling_params=harmless)
        assert response.status_code == 200
        names = "sampling_params.spaces_between_special_tokens"  # null asks for nothing
        assert response.headers["x-tandem-ignored"] == names

    run(scenario)


def test_unknown_fields_of_objects_in_a_body_are_named():
    async def scenario(server: LocalServer):
        message = {"role": "user", "content": [{"type": "text", "text": "x", "mood": "good"}], "audio": None}
        tool = {"type": "function", "function": {"name": "f", "emoji": "x"}}
        answer = {"role": "assistant", "content": "y", "annotations": [], "weight": 0}
        response = await server.post(CHAT, messages=[message, answer, *user("z")], tools=[tool], nothing=1)
        assert response.status_code == 200
        named = set(response.headers["x-tandem-ignored"].split(", "))
        assert named == {
            "nothing", "messages[].content[].mood", "messages[].weight", "tools[].function.emoji",
        }  # fmt: skip
        message["audio"] = {"id": "x"}
        error = error_of(await server.post(CHAT, messages=[message]), 400)
        assert (error["param"], error["code"]) == ("messages[].audio", "not_available")

    run(scenario)


def test_an_answer_that_the_client_began():
    async def scenario(server: LocalServer):
        begun = {"role": "assistant", "content": "One, tw", "prefix": True}
        response = await server.post(CHAT, messages=[*user("Count."), begun])
        assert response.json()["choices"][0]["message"]["content"] == "One, tw"
        error = error_of(await server.post(CHAT, messages=[begun, *user("Count.")]), 400)
        assert error["param"] == "messages[0].prefix"

    run(scenario)


def test_names_and_usage_that_clients_ask_for():
    async def scenario(server: LocalServer):
        for path, body in ((CHAT, {"messages": user("abc")}), ("/v1/completions", {"prompt": "abc"})):
            assert (await server.post(path, **body, rid="mine")).json()["id"] == "mine"
            options = {"include_usage": True, "continuous_usage_stats": True}
            response = await server.post(path, **body, stream=True, stream_options=options)
            counts = [event["usage"]["completion_tokens"] for event in events(response.text)]
            assert counts == sorted(counts) and {1, 2, 3} <= set(counts)

    run(scenario)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions is here"),
        ("/v1/v1/messages/", "/v1/messages is here"),
        ("/v1/generate", "/generate is here"),
        ("/completion", "/v1/completions is here"),
        ("/slots", "/get_server_info is here"),
        ("/v1/responses/compact", "write a summary yourself"),
        ("/responses/compact", "write a summary yourself"),
        ("/v1/rerank", "this model writes text"),
        ("/embeddings", "this model writes text"),
    ],
)
def test_a_route_that_was_meant_is_named(path: str, meant: str):
    async def scenario(server: LocalServer):
        error = error_of(await server.client.post(path, json={}), 404)
        assert meant in error["message"] and error["code"] == "unknown_route"

    run(scenario)


def test_ollama_s_clients_hear_who_chooses_the_model():
    async def scenario(server: LocalServer):
        response = await server.client.post("/api/pull", json={})
        assert response.status_code == 404 and "by kt serve MODEL or kt serve --models FILE" in response.json()["error"]

    run(scenario)


@pytest.mark.parametrize(("body", "says"), [(b"", "is empty; send JSON"), (b"{", "is not valid JSON")])
def test_a_body_that_is_no_json(body: bytes, says: str):
    async def scenario(server: LocalServer):
        error = error_of(await server.client.post(CHAT, content=body), 400)
        assert says in error["message"] and error["code"] == "invalid_json"

    run(scenario)


def test_compressed_bodies():
    async def scenario(server: LocalServer):
        body, headers = gzip.compress(b'{"prompt": "x"}'), {"content-encoding": "gzip"}
        response = await server.client.post("/v1/completions", content=body, headers=headers)
        assert "content-encoding" in error_of(response, 415)["message"]
        headers = {"content-encoding": "identity"}
        assert (
            await server.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        ).is_success

    run(scenario)


def test_routes_and_methods():
    async def scenario(server: LocalServer):
        assert error_of(await server.client.get("/nope"), 404)["code"] == "unknown_route"
        assert error_of(await server.client.get(CHAT), 405)["code"] == "method_not_allowed"
        assert error_of(await server.client.get("/v1/models/other"), 404)["code"] == "model_not_found"
        error_of(await server.client.post("/abort_request", json={}), 400)

    run(scenario)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_any_name_means_the_model_that_is_served(path):
    """The tutorials' curl says "model-name"; the answer says what answered."""

    async def scenario(server: LocalServer):
        text = {"messages": [{"role": "user", "content": "ab"}], "prompt": "ab"}
        body = {"model": "model-name", **{k: text[k] for k in ("messages" if path == CHAT else "prompt",)}}
        response = await server.client.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == server.state.model_name != "model-name"

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
