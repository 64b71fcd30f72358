"""/v1/responses with OpenAI's own client. The echo model says what the last user says."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import echo_engine
from echo_tokenizer import seen_by_the_template
from server_harness import LocalServer
from server_requests import error_of, run
from tandem.errors import EngineError
from tandem.server.chat.conversation import Message
from tandem.server.errors import ApiError
from tandem.server.responses.store import ResponseStore, StoredResponse
from tandem.server.responses.writer import ResponseWriter
from tool_outputs import ARGUMENTS, OUTPUTS, TOOLS

HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
THOUGHT = "<think>\nHm, hm.\n</think>\n\n"
PATH = "/v1/responses"
FUNCTIONS: list[Any] = [
    {"type": "function", "name": t.name, "description": t.description, "parameters": t.parameters, "strict": False}
    for t in TOOLS.values()
]  # fmt: skip


def client_of(server: LocalServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://tandem/v1", api_key="none", http_client=server.client, max_retries=0
    )


def shown(items: list[Any]) -> list[tuple[str, Any]]:
    """What items say, without their ids."""
    said: list[tuple[str, Any]] = []
    for item in items:
        if item.type == "function_call":
            said.append((item.name, json.loads(item.arguments)))
        else:
            said.append((item.type, item.content[0].text))
    return said


EXPECTED = [("reasoning", "Hm, hm."), ("message", "Hm."), ("weather", ARGUMENTS), ("now", {})]


def test_text_reasoning_and_calls():
    async def scenario(server: LocalServer):
        create = client_of(server).responses.create
        answer = await create(model="any", input=THOUGHT + OUTPUTS["hermes"], tools=FUNCTIONS)
        assert shown(answer.output) == EXPECTED
        assert answer.status == "completed" and answer.model == "echo" and answer.output_text == "Hm."
        usage = answer.usage
        assert usage.input_tokens + usage.output_tokens == usage.total_tokens
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        cut = await create(model="any", input="one two", max_output_tokens=3)
        assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
        assert cut.output_text == "one"

    run(scenario, **HERMES)


def test_streamed_is_whole():
    async def scenario(server: LocalServer):
        asked = {"model": "any", "input": THOUGHT + OUTPUTS["hermes"], "tools": FUNCTIONS}
        async with client_of(server).responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert shown(final.output) == EXPECTED and final.status == "completed"
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
        assert "response.reasoning_text.delta" in kinds and "response.function_call_arguments.done" in kinds
        assert [event.sequence_number for event in events] == list(range(len(events)))

    run(scenario, **HERMES)


def test_the_order_of_events():
    async def scenario(server: LocalServer):
        text = (await server.post(PATH, input="Hi", stream=True)).text
        names = [line.removeprefix("event: response.") for line in text.split("\n") if line.startswith("event")]
        assert names == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip

    run(scenario)


def test_it_goes_on_from_a_response(monkeypatch):
    """The same prompt as when the client keeps all items itself. `instructions` are of one response only."""
    seen = seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        create = client_of(server).responses.create
        first = await create(
            model="any", input=THOUGHT + OUTPUTS["hermes"], tools=FUNCTIONS, instructions="Be brief."
        )
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": c.call_id, "output": "Rain."} for c in calls]
        more = [*results, {"role": "user", "content": [{"type": "input_text", "text": "Fine."}]}]
        second = await create(model="any", input=more, previous_response_id=first.id, instructions="Be kind.")
        assert second.output_text == "Fine." and second.previous_response_id == first.id
        by_id = list(seen)
        assert [m["role"] for m in by_id] == ["system", "user", "assistant", "tool", "tool", "user"]
        assert by_id[0]["content"] == "Be kind." and by_id[2]["reasoning_content"] == "Hm, hm."
        asked = {"role": "user", "content": THOUGHT + OUTPUTS["hermes"]}
        whole = [asked, *[item.model_dump() for item in first.output], *more]
        await create(model="any", input=whole, instructions="Be kind.", store=False)
        assert seen == by_id

    run(scenario, **HERMES)


def test_items_are_referred_to_by_their_ids(monkeypatch):
    """Vercel's AI SDK sends the ids of what was answered, unless `store` is false."""
    seen = seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        create = client_of(server).responses.create
        asked = {"role": "user", "content": THOUGHT + OUTPUTS["hermes"]}
        first = await create(model="any", input=[asked], tools=FUNCTIONS)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}
            for item in first.output if item.type == "function_call"
        ]  # fmt: skip
        more = [*results, {"role": "user", "content": "Fine."}]
        await create(model="any", input=[asked, *[item.model_dump() for item in first.output], *more])
        whole = list(seen)
        named = [{"type": "item_reference", "id": item.id} for item in first.output]
        second = await create(model="any", input=[asked, *named, *more])
        assert second.output_text == "Fine." and seen == whole
        third = await create(model="any", input="Why?", previous_response_id=second.id)
        assert third.output_text == "Why?" and seen[: len(whole)] == whole  # references are kept resolved
        with pytest.raises(openai.BadRequestError, match="named twice") as twice:  # it would multiply a long one
            await create(model="any", input=[asked, *named, named[0]])
        assert twice.value.param == f"input[{1 + len(named)}].id"
        await client_of(server).responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match="there is no item") as unknown:
            await create(model="any", input=[asked, *named])
        assert (unknown.value.param, unknown.value.code) == ("input[1].id", "item_not_found")

    run(scenario, **HERMES)


def test_stored_responses():
    async def scenario(server: LocalServer):
        responses = client_of(server).responses
        answer = await responses.create(model="any", input="x", metadata={"mine": "1"})
        again = await responses.retrieve(answer.id)
        assert again.output_text == "x" and again.metadata == {"mine": "1"}
        await responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError) as gone:
            await responses.retrieve(answer.id)
        assert gone.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError, match="there is no response") as unknown:
            await responses.create(model="any", input="x", previous_response_id=answer.id)
        assert unknown.value.code == "previous_response_not_found"
        assert unknown.value.param == "previous_response_id"
        unstored = await responses.create(model="any", input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(unstored.id)

    run(scenario)


def test_an_effort_is_taken_or_named():
    """Agents send it to every model."""

    async def scenario(server: LocalServer, expected: str):
        asked = {"effort": "medium", "summary": "auto"}
        answer = await server.post(PATH, input="x", reasoning=asked)
        assert answer.status_code == 200 and answer.json()["reasoning"]["effort"] == "medium"
        assert answer.headers["x-tandem-ignored"] == expected

    run(lambda server: scenario(server, "reasoning.effort, reasoning.summary"), reasoning_parser="none")
    run(lambda server: scenario(server, "reasoning.summary"), reasoning_parser="qwen3")


def test_the_store_is_bounded():
    def stored(text: str) -> StoredResponse:
        return StoredResponse((Message("user", text),), b"{}")

    def with_item(name: str) -> StoredResponse:
        """Its body is not read again for an item: that would take long, for hundreds of items."""
        return StoredResponse((Message("user", "x"),), b"no JSON", {f"msg-{name}": b'{"id": "msg-%s"}' % name.encode()})

    store = ResponseStore(most=3)
    for name in "abc":
        store.put(name, with_item(name))
    assert store.item("msg-a", "") == {"id": "msg-a"}
    store.put("d", with_item("d"))
    assert store.get("a", "") and store.get("d", "")  # b was used longest ago
    with pytest.raises(ApiError):
        store.get("b", "previous_response_id")
    with pytest.raises(ApiError):
        store.item("msg-b", "")
    small = ResponseStore(most_bytes=10_000)
    for name in "abc":
        small.put(name, stored("x" * 1000))
    assert small.get("b", "") and small.get("c", "")
    with pytest.raises(ApiError):
        small.get("a", "")
    small.put("huge", stored("x" * 10_000))
    with pytest.raises(ApiError):
        small.get("huge", "")
    assert small.get("b", "") and small.get("c", "")  # they did not make room for what is not kept
    small.put("huge", StoredResponse((Message("user", "x"),), b"{}", {"msg-huge": b"x" * 10_000}))
    with pytest.raises(ApiError):
        small.item("msg-huge", "")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    "their tools": ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    "an unknown tool": ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    "an item": ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
    "an item that is not there": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    "no item": ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    "an output of nothing": ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "background": ({"background": True}, "background"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "too long": ({"input": "x" * 5000}, "input"),
    "nothing": ({"input": []}, "input"),
}


@pytest.mark.parametrize("name", BAD)
def test_complaints_name_the_field(name):
    fields, param = BAD[name]

    async def scenario(server: LocalServer):
        assert error_of(await server.post(PATH, **{"input": "x"} | fields), 400)["param"] == param

    run(scenario, **HERMES)


def test_a_failing_stream_ends_with_an_event(monkeypatch):
    def died(writer: ResponseWriter) -> bytes:
        raise EngineError("the engine died")

    async def scenario(server: LocalServer):
        monkeypatch.setattr(ResponseWriter, "last", died)
        lines = (await server.post(PATH, input="x", stream=True)).text.split("\n")
        names = [line for line in lines if line.startswith("event: ")]
        assert names[-1] == "event: response.failed" and "event: error" not in names
        response = json.loads(lines[-3].removeprefix("data: "))["response"]
        assert response["status"] == "failed" and response["error"]["message"] == "the engine died"

    run(scenario)


def test_a_limit_beyond_the_context_is_cut_to_it():
    async def scenario(server: LocalServer):
        create = client_of(server).responses.create
        assert (await create(model="any", input="one", max_output_tokens=64000)).status == "completed"
        cut = await create(model="any", input="x" * (echo_engine.CONTEXT - 100), max_output_tokens=64000)
        assert cut.status == "incomplete" and cut.max_output_tokens == 64000
        assert cut.incomplete_details.reason == "max_output_tokens"

    run(scenario)
