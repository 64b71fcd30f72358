"""A null is what a client sends for what it leaves out: of any optional field, at any depth."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from echo_tokenizer import seen_by_the_template
from server_harness import LocalServer
from server_requests import CHAT, error_of, run, user
from tandem.server.anthropic import schema as anthropic
from tandem.server.body import decode_fields
from tandem.server.chat.openai.schema import ChatRequest
from tandem.server.info.schema import DetokenizeBody, TokenizeBody
from tandem.server.ollama import schema as ollama
from tandem.server.openai_schema import CompletionRequest
from tandem.server.responses.schema import ResponsesRequest
from tandem.server.sglang_schema import SglangRequest

BODIES: list[type[msgspec.Struct]] = [
    ChatRequest, CompletionRequest, SglangRequest, anthropic.MessagesRequest, anthropic.CountRequest, ResponsesRequest,
    ollama.ChatBody, ollama.GenerateBody, ollama.ShowBody, TokenizeBody, DetokenizeBody,
]  # fmt: skip
SIMPLE: dict[type, Any] = {
    inspect.StrType: "x", inspect.IntType: 1, inspect.FloatType: 1.0, inspect.BoolType: True, inspect.AnyType: 1,
    inspect.NoneType: None, inspect.DictType: {},
}  # fmt: skip


def example(kind: inspect.Type, nulls: bool) -> Any:
    """A value of the type. nulls: whatever is optional in its objects is null, else it is left out."""
    match kind:
        case inspect.Metadata():
            return example(kind.type, nulls)
        case inspect.UnionType():
            parts = [part for part in kind.types if not isinstance(part, inspect.NoneType)]
            return example(max(parts, key=has_objects), nulls)
        case inspect.StructType():
            required = {f.encode_name: example(f.type, nulls) for f in kind.fields if f.required}
            optional = {f.encode_name: inside(f.type, nulls) for f in kind.fields if not f.required}
            return required | {name: value for name, value in optional.items() if nulls or value is not None}
        case inspect.ListType():
            return [example(kind.item_type, nulls)]
        case inspect.LiteralType():
            return kind.values[0]
    return SIMPLE[type(kind)]


def inside(kind: inspect.Type, nulls: bool) -> Any:
    return example(kind, nulls) if has_objects(kind) and not recursive(kind) else None


def has_objects(kind: inspect.Type) -> bool:
    match kind:
        case inspect.StructType():
            return True
        case inspect.Metadata():
            return has_objects(kind.type)
        case inspect.ListType():
            return has_objects(kind.item_type)
        case inspect.UnionType():
            return any(map(has_objects, kind.types))
    return False


def recursive(kind: inspect.Type, depth: int = 0) -> bool:
    match kind:
        case inspect.StructType():
            return depth > 8 or any(recursive(f.type, depth + 1) for f in kind.fields)
        case inspect.Metadata():
            return recursive(kind.type, depth)
        case inspect.ListType():
            return recursive(kind.item_type, depth)
        case inspect.UnionType():
            return any(recursive(part, depth) for part in kind.types)
    return False


@pytest.mark.parametrize("body", BODIES, ids=lambda body: f"{body.__module__.split('.')[2]}.{body.__name__}")
def test_nulls_say_what_leaving_out_says(body):
    kind = inspect.type_info(body)
    with_nulls, without = example(kind, nulls=True), example(kind, nulls=False)
    assert str(with_nulls).count("None") >= 2
    bodies = [msgspec.json.encode(one) for one in (with_nulls, without)]
    fields = [msgspec.json.decode(one, type=dict[str, msgspec.Raw]) for one in bodies]
    (first, unknown), (second, _) = (decode_fields(each, body) for each in fields)
    if body is SglangRequest:  # there null means up to the context's end
        first.sampling_params.max_new_tokens = second.sampling_params.max_new_tokens
    assert first == second and not unknown


def test_a_result_without_an_id_answers_the_call_that_waits(monkeypatch):
    seen = seen_by_the_template(monkeypatch)

    def call(name: str, **fields: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": None}, "type": None} | fields

    def result(text: str, **fields: Any) -> dict[str, Any]:
        return {"role": "tool", "content": text, "tool_call_id": None} | fields

    calls = [call("look", id="a"), call("hear", id=None), call("look", id="c")]
    results = [result("1"), result("2", tool_call_id="c"), result("3", name="hear")]

    async def scenario(server: LocalServer):
        turns = [*user("x"), {"role": "assistant", "content": None, "tool_calls": calls}, *results]
        response = await server.post(CHAT, messages=turns, max_tokens=4)
        assert response.status_code == 200, response.text
        said = seen[1]["tool_calls"]
        assert [call["function"]["arguments"] for call in said] == [{}, {}, {}]
        assert [m["tool_call_id"] for m in seen[2:]] == ["a", "c", said[1]["id"]]
        late = [*turns, result("4")]
        assert error_of(await server.post(CHAT, messages=late), 400)["param"] == "messages[5].tool_call_id"

    run(scenario, tool_call_parser="hermes")


def test_a_required_field_is_not_null():
    async def scenario(server: LocalServer):
        assert error_of(await server.post(CHAT, messages=None), 400)["param"] == "messages"
        bad = [{"role": None, "content": "x"}]
        assert error_of(await server.post(CHAT, messages=bad), 400)["param"] == "messages[0].role"

    run(scenario)
