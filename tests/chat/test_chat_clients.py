"""Clients that people have, against the server of this process: calls, their results and reasoning go both ways.

The echo model says what the last user says, so the user says the call that the model is to make. Clients that are not
installed are skipped: `pip install '.[clients]'`.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from server_harness import LocalServer
from server_requests import run, user
from tool_outputs import ARGUMENTS, OPENAI_TOOLS, OUTPUTS

HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
THOUGHT = "<think>\nHm, hm.\n</think>\n\n"
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


def async_openai(server: LocalServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://tandem/v1", api_key="none", http_client=server.client, max_retries=0
    )


def test_openai():
    async def scenario(server: LocalServer):
        client = async_openai(server)
        answer = await client.chat.completions.create(
            model="echo", messages=user(THOUGHT + OUTPUTS["hermes"]), tools=OPENAI_TOOLS
        )
        message = answer.choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
        assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
        assert message.reasoning_content == "Hm, hm."
        history = [*user("Weather?"), message.model_dump()]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls]
        again = await client.chat.completions.create(model="echo", messages=[*history, *user("Fine.")])
        assert again.choices[0].message.content == "Fine."

    run(scenario, **HERMES)


def test_openai_streams_the_same():
    async def scenario(server: LocalServer):
        client = async_openai(server)
        strict = [tool | {"function": tool["function"] | {"strict": True}} for tool in OPENAI_TOOLS]
        asked = {"model": "echo", "messages": user(OUTPUTS["hermes"]), "tools": strict}
        async with client.chat.completions.stream(**asked) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert (
            "tool_calls.function.arguments.delta" in seen
            and seen.count("tool_calls.function.arguments.done") == 2
        )
        calls = final.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS, {}]
        assert final.choices[0].message.content == "Hm." and final.choices[0].finish_reason == "tool_calls"

    run(scenario, **HERMES)


def test_langchain():
    chat_openai: Any = pytest.importorskip("langchain_openai").ChatOpenAI

    async def scenario(server: LocalServer):
        from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage

        model = chat_openai(
            model="echo",
            base_url="http://tandem/v1",
            api_key="none",
            http_async_client=server.client,
            max_retries=0,
        )
        bound = model.bind_tools(OPENAI_TOOLS)
        answer = await bound.ainvoke(OUTPUTS["hermes"])
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
            ("weather", ARGUMENTS),
            ("now", {}),
        ]
        assert not answer.invalid_tool_calls and answer.content == "Hm."
        total = AIMessageChunk("")
        async for chunk in bound.astream(OUTPUTS["hermes"]):
            total = total + chunk
        assert [call["args"] for call in total.tool_calls] == [ARGUMENTS, {}]
        results = [ToolMessage("x", tool_call_id=call["id"]) for call in answer.tool_calls]
        last = await bound.ainvoke([HumanMessage("Weather?"), answer, *results, HumanMessage("Fine.")])
        assert last.content == "Fine."

    run(scenario, **HERMES)


def test_pydantic_ai():
    agent_kind: Any = pytest.importorskip("pydantic_ai").Agent

    async def scenario(server: LocalServer):
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel("echo", provider=OpenAIProvider(openai_client=async_openai(server)))
        agent, asked = agent_kind(model), []

        @agent.tool_plain
        def weather(city: str, days: int) -> str:
            asked.append((city, days))
            return "Rain in Oslo."

        answer = await agent.run(WEATHER_CALL)
        assert asked == [("Oslo", 2)]
        assert answer.output == "Rain in Oslo."  # the result is what was said last

    run(scenario, **HERMES)


def test_litellm():
    litellm: Any = pytest.importorskip("litellm")

    async def scenario(server: LocalServer):
        answer = await litellm.acompletion(
            model="openai/echo", messages=user(THOUGHT + OUTPUTS["hermes"]), tools=OPENAI_TOOLS,
            client=async_openai(server), api_key="none", api_base="http://tandem/v1",
        )  # fmt: skip
        message = answer.choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
        assert message.reasoning_content == "Hm, hm."

    run(scenario, **HERMES)
