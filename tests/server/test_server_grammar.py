"""Structured output over HTTP: every field that asks for it, on a model that wants to say something else."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import jsonschema_rs
import msgspec
import openai
import pydantic
import pytest

from server_harness import LocalServer, local_server
from server_requests import CHAT, error_of, events, user
from tandem.engine.grammar import compiler
from tandem.engine.grammar.sources import json_object
from tandem.errors import EngineError
from tandem.server.chat.answer_grammar import OpenAIGrammarFields, grammar_of

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<<", "content": {"type": "regex", "pattern": "[ab]{2}"}, "end": ">>"},
}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<<", "schema": SCHEMA, "end": ">>"}],
    "triggers": ["<<"],
}
WORDS = ["yes", "no", "per\u00adhaps"]
EBNF = 'root ::= "ab" | "cd" root'

FIELDS = [
    ({"response_format": NAMED}, SCHEMA), ({"guided_json": SCHEMA}, SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA), ({"json_schema": json.dumps(SCHEMA)}, SCHEMA),
    ({"guided_regex": "[xy]{5}"}, "[xy]{5}"), ({"regex": "[xy]{5}"}, "[xy]{5}"),
    ({"structured_outputs": {"regex": "[xy]{5}"}}, "[xy]{5}"),
    ({"guided_choice": WORDS}, "|".join(WORDS)), ({"structured_outputs": {"choice": WORDS}}, "|".join(WORDS)),
    ({"guided_grammar": EBNF}, "(cd)*ab"), ({"ebnf": EBNF}, "(cd)*ab"),
    ({"structured_outputs": {"grammar": EBNF}}, "(cd)*ab"), ({"grammar": EBNF}, "(cd)*ab"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
    ({"response_format": TAG}, "<<[ab]{2}>>"), ({"structural_tag": json.dumps(TAG)}, "<<[ab]{2}>>"),
]  # fmt: skip


def check(text: str, wanted: str | dict) -> None:
    if isinstance(wanted, str):
        assert re.fullmatch(wanted, text), text
    else:
        assert jsonschema_rs.is_valid(wanted, json.loads(text)), text


@pytest.fixture(scope="module")
def served():
    """One server for all of them: the first grammar takes seconds to import."""
    with asyncio.Runner() as runner:
        opened = local_server(tool_call_parser="hermes", reasoning_parser="qwen3")
        server = runner.run(opened.__aenter__())
        yield lambda scenario: runner.run(asyncio.wait_for(scenario(server), 60))
        runner.run(opened.__aexit__(None, None, None))


@pytest.mark.parametrize(("fields", "wanted"), FIELDS, ids=lambda one: json.dumps(one)[:40])
def test_fields_of_openai_routes(served, fields, wanted) -> None:
    async def scenario(server: LocalServer) -> None:
        common = {"seed": 3, "max_tokens": 900, **fields}
        whole = (await server.post("/v1/completions", prompt="Hi", **common)).json()["choices"][0]
        assert whole["finish_reason"] == "stop"
        check(whole["text"], wanted)
        response = await server.post("/v1/completions", prompt="Hi", stream=True, **common)
        assert "".join(e["choices"][0]["text"] for e in events(response.text)) == whole["text"]
        chat = await server.post(CHAT, messages=user("Hi"), enable_thinking=None, **common)
        check(chat.json()["choices"][0]["message"]["content"], wanted)

    served(scenario)


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_fields_of_generate(served, name) -> None:
    given = {
        "json_schema": json.dumps(SCHEMA),
        "regex": "[xy]{5}",
        "ebnf": EBNF,
        "structural_tag": json.dumps(TAG),
    }
    wanted = {"json_schema": SCHEMA, "regex": "[xy]{5}", "ebnf": "(cd)*ab", "structural_tag": "<<[ab]{2}>>"}

    async def scenario(server: LocalServer) -> None:
        params = {"max_new_tokens": 900, "n": 3, name: given[name]}
        for each in (await server.post("/generate", text="Hi", sampling_params=params)).json():
            assert each["meta_info"]["finish_reason"]["type"] == "stop"
            check(each["text"], wanted[name])

    served(scenario)


@pytest.mark.parametrize("schema", [{}, True])
def test_a_schema_that_says_nothing_leaves_an_object_one(schema: object) -> None:
    """As in llama.cpp."""
    fields = msgspec.convert({"response_format": {"type": "json_object", "schema": schema}}, OpenAIGrammarFields)
    assert grammar_of(fields) == json_object()


def test_json_object_and_older_tags(served) -> None:
    async def scenario(server: LocalServer) -> None:
        asked = {"prompt": '{"a": [1]}', "max_tokens": 900, "seed": 1}
        for said in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ):
            answer = (await server.post("/v1/completions", **asked, **said)).json()["choices"][0]
            assert json.loads(answer["text"]) == {"a": [1]}
        answer = (
            await server.post("/v1/completions", prompt="Hi<<x", max_tokens=900, response_format=OLD_TAG)
        ).json()
        text = answer["choices"][0]["text"]
        assert text.startswith("Hi<<")
        check(text[4:].partition(">>")[0], SCHEMA)

    served(scenario)


BAD = [
    ({"regex": "a", "guided_json": SCHEMA}, "guided_json"),
    ({"response_format": {"type": "json_object"}, "ebnf": EBNF}, "response_format"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}},
        "response_format",
    ),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"ebnf": "root ::="}, "ebnf"),
    ({"structural_tag": "[]"}, "structural_tag"),
    ({"regex": "a" * 600_000}, "regex"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda one: json.dumps(one)[:40])
def test_bad_ones_are_refused_by_name(served, fields, param, stream) -> None:
    async def scenario(server: LocalServer) -> None:
        error = error_of(await server.post("/v1/completions", prompt="x", stream=stream, **fields), 400)
        assert error["param"] == param and error["type"] == "invalid_request_error"
        error = error_of(await server.post(CHAT, messages=user("x"), stream=stream, **fields), 400)
        assert error["param"] == param
        assert server.state.client.open_answers == 0

    served(scenario)


def test_reasoning_comes_before_what_must_match(served) -> None:
    async def scenario(server: LocalServer) -> None:
        said = '<think>Hm.</think>\n\n{"kind":"a","n":7}'
        for stream in (False, True):
            answer = await server.post(CHAT, messages=user(said), response_format=NAMED, stream=stream)
            message = joined(events(answer.text)) if stream else answer.json()["choices"][0]["message"]
            assert message["reasoning_content"] == "Hm." and json.loads(message["content"]) == {
                "kind": "a",
                "n": 7,
            }

    served(scenario)


def joined(chunks: list[dict]) -> dict[str, str]:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return {name: "".join(d.get(name) or "" for d in deltas) for name in ("content", "reasoning_content")}


def test_openai_client_parses(served) -> None:
    class Answer(pydantic.BaseModel):
        kind: str = pydantic.Field(pattern="^[ab]{3}$")
        numbers: list[int] = pydantic.Field(max_length=2)

    async def scenario(server: LocalServer) -> None:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app), base_url="http://tandem")
        client = openai.AsyncOpenAI(api_key="x", base_url="http://tandem/v1", http_client=http)
        said = '{"kind": "aba", "numbers": [1, 2]}'
        done = await client.chat.completions.parse(model="x", messages=user(said), response_format=Answer)
        assert done.choices[0].message.parsed == Answer(kind="aba", numbers=[1, 2])
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            schema = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
            await client.chat.completions.create(
                model="x", messages=user("x"), response_format={"type": "json_schema", "json_schema": schema}
            )

    served(scenario)


def test_too_many_grammars_at_once_are_a_429(served, monkeypatch) -> None:
    """And one that the machine was too busy for a 503: both may be asked for again."""

    async def scenario(server: LocalServer) -> None:
        monkeypatch.setattr(compiler, "MOST_SMALL_WAITING", 0)
        for stream in (False, True):
            response = await server.post("/v1/completions", prompt="x", stream=stream, regex="[0-9]{2}q")
            error = error_of(response, 429)
            assert error["code"] == "overloaded" and "Retry-After" in response.headers
        assert (await server.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200
        monkeypatch.setattr(compiler, "MOST_SMALL_WAITING", 9)
        busy = EngineError("the machine was too busy to compile it in 30 s; try again")
        monkeypatch.setattr(compiler.GrammarCompiler, "_compile", lambda *_: (_ for _ in ()).throw(busy))
        response = await server.post("/v1/completions", prompt="x", regex="[0-9]{2}r")
        assert "too busy" in error_of(response, 503)["message"] and "Retry-After" in response.headers
        assert server.state.client.open_answers == 0

    served(scenario)


@pytest.fixture(scope="module")
def served_plain():
    """One that does not reason, for dialects without a seed: reasoning is free, and may never end."""
    with asyncio.Runner() as runner:
        opened = local_server(tool_call_parser="hermes", reasoning_parser="none")
        server = runner.run(opened.__aenter__())
        yield lambda scenario: runner.run(asyncio.wait_for(scenario(server), 60))
        runner.run(opened.__aexit__(None, None, None))


DIALECTS = {
    "/v1/messages": {
        "messages": user("Hi"), "max_tokens": 900,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/v1/responses": {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "/api/chat": {"messages": user("Hi"), "format": SCHEMA, "stream": False},
    "/api/generate": {"prompt": "Hi", "format": SCHEMA, "stream": False},
}  # fmt: skip


def answered(path: str, body: dict) -> str:
    match path:
        case "/v1/messages":
            return body["content"][0]["text"]
        case "/v1/responses":
            return body["output"][0]["content"][0]["text"]
        case "/api/chat":
            return body["message"]["content"]
        case _:
            return body["response"]


@pytest.mark.parametrize("path", DIALECTS)
def test_other_dialects(served_plain, path) -> None:
    """The schema is held to, and a bad one is a 400 that names the dialect's field."""

    async def scenario(server: LocalServer) -> None:
        response = await server.post(path, **DIALECTS[path])
        assert response.status_code == 200, response.text
        check(answered(path, response.json()), SCHEMA)
        bad = json.loads(json.dumps(DIALECTS[path]).replace('"integer"', '"nonsense"'))
        refused = await server.post(path, **bad)
        assert refused.status_code == 400
        field = {"/v1/messages": "output_config.format", "/v1/responses": "text.format"}.get(path, "format")
        assert field in refused.text

    served_plain(scenario)
