"""The real thing: `python -m tandem.launch_server` serves the demo model, the official OpenAI client talks to it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import ollama
import openai
import psutil
import pytest

from quiet_clock import PATIENCE, QuietClock
from server_harness import ServerProcess, plain, running, spawn_real

pytestmark = pytest.mark.timeout(900)

CLIENTS = 64
REQUESTS = 500
CACHE_TOKENS = 4096
TINY_CACHE_TOKENS = 2048  # small, so that the first requests have touched all of it before memory is compared
MAX_GROWTH_BYTES = 48 << 20  # of resident memory over REQUESTS: a tenth of a MB per request


@pytest.fixture(scope="module")
def server(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its answers depend on no other request, on AMX neither."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ["--served-model-name", "demo", "--max-total-tokens", str(CACHE_TOKENS), "--api-key", "s3cret"]
    flags += ["--enable-deterministic-inference"]
    with running(spawn_real("demo", log, *flags, api_key="s3cret")) as process:
        yield process


def test_the_api_process_does_without_torch(server: ServerProcess):
    """Its import would make each start 1.3 s longer, and the process 200 MiB larger."""
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="s3cret", max_retries=0, timeout=300)


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def wait_until_idle(server: ServerProcess, seconds: float = PATIENCE) -> dict:
    """The engine's statistics once nothing runs and every page is available."""
    ends = time.monotonic() + seconds
    while True:
        info = server.info()
        stats = info["stats"]
        if stats["running"] == stats["waiting"] == info["open_answers"] == 0:
            assert stats["pages_free"] == stats["pages_total"]
            return stats
        assert time.monotonic() < ends, f"never idle: {stats}"
        time.sleep(0.05)


def test_start_up_says_how_to_begin(server: ServerProcess):
    ends = time.monotonic() + PATIENCE  # /health can be green a moment before the greeting is printed
    while f"demo is ready at {server.url}" not in (text := server.log.read_text()):
        assert time.monotonic() < ends, text
        time.sleep(0.05)
    assert f"curl {server.url}/v1/chat/completions" in text and "kt chat" in text
    assert "s3cret" not in text


def test_models_and_keys(server: ServerProcess, client: openai.OpenAI):
    assert [m.id for m in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()


def test_the_key_is_neither_in_the_log_nor_in_ps(server: ServerProcess):
    shown = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert b"--api-key\0******\0" in shown and b"s3cret" not in shown
    assert "s3cret" not in server.log.read_text()


def test_chat_answers_sensibly(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="demo", messages=user("What is the capital of France?"), temperature=0, max_tokens=24
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_stream_equals_the_whole_answer(client: openai.OpenAI):
    request = {"model": "demo", "messages": user("Name three colours."), "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 8, "it did not stream"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_every_dialect_says_the_same(server: ServerProcess, client: openai.OpenAI):
    """Whole and streamed, each with its own client."""
    question = user("What is the capital of France? One short sentence.")
    chat = client.chat.completions.create(model="demo", messages=question, temperature=0, max_tokens=30)
    expected = chat.choices[0].message.content
    assert "Paris" in expected
    messages = anthropic.Anthropic(base_url=server.url, api_key="s3cret", max_retries=0).messages
    cold = {"temperature": 0}  # newer clients have no argument for it
    asked = {"model": "demo", "messages": question, "max_tokens": 30, "extra_body": cold}
    answer = messages.create(**asked)
    assert answer.content[0].text == expected and answer.usage.output_tokens == chat.usage.completion_tokens
    with messages.stream(**asked) as stream:
        assert stream.get_final_text() == expected
    asked = {"model": "demo", "input": question, "temperature": 0, "max_output_tokens": 30}
    assert client.responses.create(**asked).output_text == expected
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == expected
    local = ollama.Client(server.url, headers=server.headers)
    options = {"temperature": 0, "num_predict": 30}
    assert local.chat("demo", question, options=options).message.content == expected
    parts = local.generate("demo", question[0]["content"], options=options, stream=True)
    assert "".join(part.response for part in parts) == expected


def test_every_dialect_makes_a_call_that_must_be_made(server: ServerProcess, client: openai.OpenAI):
    """Constrained decoding: what the model says fits the schema, and a result goes back. A busy machine may want to be
    asked again for a grammar."""
    client = client.with_options(max_retries=5)
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    question = user("What is the weather in Paris?")
    messages = anthropic.Anthropic(base_url=server.url, api_key="s3cret", max_retries=5).messages
    tools = [{"name": "weather", "description": "Tells the weather", "input_schema": schema}]
    asked = {"model": "demo", "max_tokens": 100, "tools": tools, "extra_body": {"temperature": 0}}
    answer = messages.create(**asked, messages=question, tool_choice={"type": "any"})
    call = answer.content[-1]
    assert answer.stop_reason == "tool_use" and call.name == "weather"
    assert call.input["city"] in ("Paris", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    history = [
        *question,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    usage = messages.create(**asked, messages=history).usage
    assert usage.input_tokens + usage.cache_read_input_tokens > answer.usage.input_tokens
    function = {"type": "function", "name": "weather", "parameters": schema, "strict": True}
    response = client.responses.create(
        model="demo", input=question, tools=[function], tool_choice="required", max_output_tokens=100,
        parallel_tool_calls=False, temperature=0,
    )  # fmt: skip
    assert [item.type for item in response.output] == ["function_call"]
    output = {"type": "function_call_output", "call_id": response.output[0].call_id, "output": "It rains."}
    again = client.responses.create(
        model="demo", input=[output], previous_response_id=response.id, tools=[function], max_output_tokens=20
    )
    assert again.usage.input_tokens > response.usage.input_tokens


def test_n_answers_with_a_seed(client: openai.OpenAI):
    def ask(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model="demo", messages=user("Invent a name."), n=3, seed=seed, temperature=1.5, max_tokens=12
        )
        assert [c.index for c in answer.choices] == [0, 1, 2]
        return [c.message.content or "" for c in answer.choices]

    first = ask(1)
    assert len(set(first)) > 1, "n answers are different samples"
    assert ask(1) == first and ask(2) != first


def test_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="demo", messages=user("Say yes."), temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(t.logprob for t in entry.top_logprobs))  # greedy


def test_completions_echo_and_scores(client: openai.OpenAI):
    answer = client.completions.create(
        model="demo", prompt="The quick brown fox", echo=True, logprobs=1, max_tokens=4, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("The quick brown fox")
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert "".join(choice.logprobs.tokens).startswith("The quick brown fox")


def test_stop(client: openai.OpenAI):
    prompt = "Count: 1, 2, 3, 4,"
    answer = client.completions.create(model="demo", prompt=prompt, stop=[" 7"], max_tokens=40, temperature=0)
    assert answer.choices[0].finish_reason == "stop" and " 7" not in answer.choices[0].text
    assert " 5" in answer.choices[0].text


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"n": 0}, openai.BadRequestError),
        ({"max_tokens": -5}, openai.BadRequestError),
        ({"temperature": 1e9}, openai.BadRequestError),
        ({"messages": user("word " * 10_000)}, openai.BadRequestError),
        ({"stop": ["x"] * 10_000}, openai.BadRequestError),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError),
    ],
)
def test_errors(client: openai.OpenAI, changes: dict, kind: type[openai.APIStatusError]):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**({"model": "demo", "messages": user("hi")} | changes))
    assert caught.value.body["message"]  # type: ignore[index]


def test_a_client_that_leaves_frees_its_pages(server: ServerProcess, client: openai.OpenAI):
    before, ends = wait_until_idle(server), time.monotonic() + PATIENCE
    stream = client.chat.completions.create(
        model="demo",
        messages=user("Write a long story."),
        stream=True,
        max_tokens=800,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    while not server.info()["stats"]["running"]:  # statistics follow what a step has made
        assert time.monotonic() < ends
    closed = QuietClock()
    stream.close()
    after = wait_until_idle(server)
    assert closed.seconds() < 3
    assert after["aborted_requests"] == before["aborted_requests"] + 1
    assert after["generated_tokens"] - before["generated_tokens"] < 400


def marker_prompt(number: int) -> list:
    """Two clients ask each: one gets a stream, one a whole answer."""
    number //= 2
    return user(
        f"Repeat exactly this and nothing else: marker-{number * 37 % 1000:03d}-{'abcdefgh'[number % 8] * 3}"
    )


def test_64_clients_get_their_own_answers(server: ServerProcess, client: openai.OpenAI):
    """Greedy answers are those of a single client: none lost, none mixed up."""
    options = {"model": "demo", "temperature": 0, "max_tokens": 14}
    alone = [
        client.chat.completions.create(messages=marker_prompt(i), **options).choices[0].message.content
        for i in range(0, CLIENTS, 2)
    ]
    assert len(set(alone)) > CLIENTS // 4, "the prompts do not tell the clients apart"

    async def one(http: openai.AsyncOpenAI, number: int) -> str:
        if number % 2:
            answer = await http.chat.completions.create(messages=marker_prompt(number), **options)
            return answer.choices[0].message.content or ""
        stream = await http.chat.completions.create(messages=marker_prompt(number), stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everybody() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="s3cret", max_retries=0, timeout=600
        ) as http:
            return await asyncio.gather(*(one(http, i) for i in range(CLIENTS)))

    assert asyncio.run(everybody()) == [answer for answer in alone for _ in range(2)]
    wait_until_idle(server)


@pytest.fixture
def small_server(tiny_models, tmp_path: Path) -> Iterator[ServerProcess]:
    """Of the demo's family. What a request leaves behind does not depend on the size of the model."""
    flags = ["--max-total-tokens", str(TINY_CACHE_TOKENS), "--api-key", "s3cret"]
    with running(spawn_real(tiny_models["glm4_moe"], tmp_path / "log", *flags, api_key="s3cret")) as process:
        yield process


def test_memory_and_pages_come_back(small_server: ServerProcess):
    """After 500 requests (whole, streamed, aborted) no page is missing and the processes have not grown."""
    server = small_server
    post(server, "word " * 20, 1)  # touches the KV pages
    asyncio.run(many_requests(server, 50))
    wait_until_ended(server, 52)  # the first was the start's own
    processes = [psutil.Process(server.process.pid), psutil.Process(server.engine_pid())]
    before = [p.memory_info().rss for p in processes]
    asyncio.run(many_requests(server, REQUESTS))
    wait_until_ended(server, 52 + REQUESTS)
    growth = [p.memory_info().rss - b for p, b in zip(processes, before, strict=True)]
    assert max(growth) < MAX_GROWTH_BYTES, growth
    plain.post(server.url + "/flush_cache", headers=server.headers)
    assert wait_until_idle(server)["pages_cached"] == 0


def wait_until_ended(server: ServerProcess, count: int) -> None:
    """Until the engine has said that so many requests have ended since its start, and no more, and is idle."""
    ends = time.monotonic() + PATIENCE
    while requests_ended(wait_until_idle(server)) < count:
        assert time.monotonic() < ends, server.info()["stats"]
        time.sleep(0.05)
    assert requests_ended(server.info()["stats"]) == count


def requests_ended(stats: dict) -> int:
    return stats["finished_requests"] + stats["aborted_requests"]


def post(server: ServerProcess, prompt: str, max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    headers = {"Authorization": "Bearer s3cret"}
    assert (
        plain.post(server.url + "/v1/completions", json=body, headers=headers, timeout=300).status_code == 200
    )


async def many_requests(server: ServerProcess, count: int) -> None:
    """Short ones, 16 at a time: a third whole, a third streamed, a third left after the first event."""
    gate = asyncio.Semaphore(16)

    async def one(http: httpx.AsyncClient, number: int) -> None:
        kind = number % 3
        body = {"prompt": f"Request {number}:", "max_tokens": 3 if kind < 2 else 50, "stream": kind > 0}
        async with gate, http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_bytes():
                if kind == 2:
                    return

    headers = {"Authorization": "Bearer s3cret"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300) as http:
        await asyncio.gather(*(one(http, i) for i in range(count)))


def test_engine_killed_and_back_then_sigterm(server: ServerProcess, client: openai.OpenAI):
    """Last: this server ends here."""
    stream = client.chat.completions.create(
        model="demo",
        messages=user("Write a long story."),
        stream=True,
        max_tokens=800,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    os.kill(server.engine_pid(), signal.SIGKILL)
    killed = QuietClock()
    with pytest.raises(openai.APIError, match="SIGKILL"):
        list(stream)
    assert killed.seconds() < 2.0
    assert not server.healthy()
    server.wait_until_ready()
    answer = client.chat.completions.create(model="demo", messages=user("Hello"), max_tokens=4)
    assert answer.usage.completion_tokens >= 1
    assert server.stop() == 0
