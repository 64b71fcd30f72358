"""Agent frameworks against the demo model: calls that must be made, their results, and answers held to a schema.

A small model would say anything; that all of it is valid is the server's doing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from server_harness import ServerProcess

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

QUESTION = "What will the weather be in Paris, for three days?"
USER: list[Any] = [{"role": "user", "content": QUESTION}]
LIMIT = 200  # tokens; what is asked for takes less


class Forecast(pydantic.BaseModel):
    """A forecast for a city."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Paris", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)
    kind: Literal["rain", "sun", "snow"]


SCHEMA = Forecast.model_json_schema()
TOOL = {
    "type": "function",
    "function": {"name": "forecast", "description": "Tells the weather", "parameters": SCHEMA},
}


@pytest.fixture
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    """It asks again where a 503 says so: the machine may be busy."""
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=5, timeout=300) as one:
        yield one


def test_openai_tools(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(Forecast, name="forecast")
    asked = {"model": "demo", "tools": [tool], "max_tokens": LIMIT, "temperature": 0}
    answer = client.chat.completions.parse(**asked, messages=USER, tool_choice="required")
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert all(isinstance(call.function.parsed_arguments, Forecast) for call in message.tool_calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls]
    history = [*USER, message.model_dump(exclude_none=True), *results]
    again = client.chat.completions.create(**asked, messages=history, tool_choice="none")
    assert again.choices[0].message.content and not again.choices[0].message.tool_calls
    with client.chat.completions.stream(**asked, messages=USER, tool_choice="required") as stream:
        final = stream.get_final_completion().choices[0].message
    assert [call.function.arguments for call in final.tool_calls] == [
        call.function.arguments for call in message.tool_calls
    ]


def test_openai_structured_output(client: openai.OpenAI):
    asked = {"model": "demo", "temperature": 0}
    chat = client.chat.completions.parse(**asked, messages=USER, response_format=Forecast, max_tokens=LIMIT)
    assert isinstance(chat.choices[0].message.parsed, Forecast)
    response = client.responses.parse(**asked, input=USER, text_format=Forecast, max_output_tokens=LIMIT)
    assert response.output_parsed == chat.choices[0].message.parsed
    with client.responses.stream(
        **asked, input=USER, text_format=Forecast, max_output_tokens=LIMIT
    ) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_openai_responses_tools(client: openai.OpenAI):
    tool: Any = {"type": "function", "name": "forecast", "parameters": SCHEMA, "strict": True}
    asked = {"model": "demo", "tools": [tool], "temperature": 0, "max_output_tokens": LIMIT}
    first = client.responses.create(**asked, input=USER, tool_choice={"type": "function", "name": "forecast"})
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and all(Forecast.model_validate_json(call.arguments) for call in calls)
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."} for call in calls
    ]
    again = client.responses.create(**asked, input=outputs, previous_response_id=first.id)
    assert again.output and again.usage.input_tokens > first.usage.input_tokens


def test_anthropic(demo_server: ServerProcess):
    messages = anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0).messages
    tools: list[Any] = [{"name": "forecast", "description": "Tells the weather", "input_schema": SCHEMA}]
    cold: dict[str, Any] = {"temperature": 0}  # newer clients have no argument for it
    asked: dict[str, Any] = {"model": "demo", "max_tokens": LIMIT, "tools": tools, "extra_body": cold}
    answer = messages.create(**asked, messages=USER, tool_choice={"type": "any"})
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and all(Forecast.model_validate(call.input) for call in calls)
    with messages.stream(**asked, messages=USER, tool_choice={"type": "any"}) as stream:
        streamed = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert [call.input for call in streamed] == [call.input for call in calls]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."} for call in calls
    ]
    history: list[Any] = [
        *USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    again = messages.create(**asked, messages=history, tool_choice={"type": "none"})
    assert again.content[0].type == "text"
    held = cold | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    said = messages.create(model="demo", max_tokens=LIMIT, messages=USER, extra_body=held)
    assert Forecast.model_validate_json(said.content[-1].text)


def test_langchain(demo_server: ServerProcess):
    chat_openai: Any = pytest.importorskip("langchain_openai").ChatOpenAI
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage

    model = chat_openai(
        model="demo", base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, temperature=0,
        max_tokens=LIMIT,
    )  # fmt: skip
    bound = model.bind_tools([TOOL], tool_choice="required")
    answer = bound.invoke(QUESTION)
    assert answer.tool_calls and not answer.invalid_tool_calls
    assert all(Forecast.model_validate(call["args"]) for call in answer.tool_calls)
    total = AIMessageChunk("")
    for chunk in bound.stream(QUESTION):
        total = total + chunk
    assert [call["args"] for call in total.tool_calls] == [call["args"] for call in answer.tool_calls]
    results = [ToolMessage("Rain.", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert model.invoke([HumanMessage(QUESTION), answer, *results]).content
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Forecast, method=method).invoke(QUESTION), Forecast)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(client: openai.OpenAI, mode: str):
    instructor: Any = pytest.importorskip("instructor")
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    forecast = patched.chat.completions.create(
        model="demo", messages=USER, response_model=Forecast, max_retries=0, max_tokens=LIMIT, temperature=0
    )
    assert isinstance(forecast, Forecast)


def test_pydantic_ai(demo_server: ServerProcess):
    ai: Any = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{demo_server.url}/v1", api_key="none")
    model = OpenAIChatModel("demo", provider=provider)
    settings: Any = {"temperature": 0, "max_tokens": LIMIT}
    asked: list[str] = []
    for output in (ai.ToolOutput(Forecast), ai.NativeOutput(Forecast)):
        agent = ai.Agent(model, output_type=output, model_settings=settings, retries=0)
        assert isinstance(agent.run_sync(QUESTION).output, Forecast)

    def lookup(city: Literal["Paris", "Oslo"]) -> str:
        """Tells what the weather is now."""
        asked.append(city)
        return "Rain."

    agent = ai.Agent(model, tools=[lookup], output_type=ai.ToolOutput(Forecast), model_settings=settings)
    limits = ai.UsageLimits(request_limit=6)
    try:
        assert isinstance(agent.run_sync(QUESTION, usage_limits=limits).output, Forecast)
    except ai.UsageLimitExceeded:  # a small model may ask for ever
        assert asked
    assert set(asked) <= {"Paris", "Oslo"}


def test_litellm(demo_server: ServerProcess):
    litellm: Any = pytest.importorskip("litellm")
    asked = {
        "model": "openai/demo", "messages": USER, "api_key": "none", "api_base": f"{demo_server.url}/v1",
        "max_tokens": LIMIT, "temperature": 0, "max_retries": 0,
    }  # fmt: skip
    answer = litellm.completion(**asked, tools=[TOOL], tool_choice="required")
    calls = answer.choices[0].message.tool_calls
    assert calls and all(Forecast.model_validate_json(call.function.arguments) for call in calls)
    chunks = list(litellm.completion(**asked, tools=[TOOL], tool_choice="required", stream=True))
    again = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [call.function.arguments for call in again] == [call.function.arguments for call in calls]
    said = litellm.completion(**asked, response_format=Forecast).choices[0].message.content
    assert Forecast.model_validate(json.loads(said))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "word " * 20_000}]})
