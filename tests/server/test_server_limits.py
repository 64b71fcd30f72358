"""Limits of requests that wait, that take long, and that nobody reads; in-process over ASGI."""

from __future__ import annotations

import asyncio

import pytest

import echo_engine
from quiet_clock import PATIENCE
from server_harness import LocalServer, local_server
from server_requests import CHAT, error_of, events, pages_are_back, run, user
from supervision import until

ENDLESS = {"input_ids": [97], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}


async def running(server: LocalServer, answers: int) -> None:
    while server.state.client.open_answers < answers:
        await asyncio.sleep(0.002)


def test_a_full_queue_is_a_429_that_says_when_to_come_back():
    """64 answers run at once here, and none may wait."""

    async def scenario(server: LocalServer):
        most = server.state.engine.plan.max_running_requests
        many = ENDLESS | {"sampling_params": ENDLESS["sampling_params"] | {"n": most}}
        first = asyncio.create_task(server.post("/generate", **many, rid="first"))
        await running(server, most)
        refused = await server.post("/generate", **ENDLESS)
        assert error_of(refused, 429)["code"] == "overloaded" and refused.headers["retry-after"]
        await server.post("/abort_request", rid="first")
        await first
        await pages_are_back(server)
        too_many = many["sampling_params"] | {"n": most + 1}
        error_of(await server.post("/generate", **many | {"sampling_params": too_many}), 400)
        assert (await server.post("/generate", text="x")).status_code == 200

    run(scenario, max_queued_requests=0)


def test_answers_that_wait_for_pages_count():
    async def scenario(server: LocalServer):
        stats = server.state.client.stats
        server.state.client.stats = type(stats)(running=1, waiting=3)
        error = error_of(await server.post("/generate", text="x"), 429)
        assert "--max-queued-requests" in error["message"]

    run(scenario, max_queued_requests=3)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
def test_a_request_that_takes_too_long_ends(path: str, stream: bool):
    body = {
        CHAT: {"messages": user("x" * 500)},
        "/v1/completions": {"prompt": [97], "max_tokens": 3000, "ignore_eos": True},
        "/generate": ENDLESS,
    }[path]

    async def go():
        async with local_server(echo_engine.build(seconds_per_step=0.02), request_timeout=PATIENCE) as server:
            asked = asyncio.create_task(server.post(path, **body, stream=stream))
            await until(lambda: begun_answers(server) if stream else server.state.client.open_answers)
            let_pass(PATIENCE)
            response = await asked
            if stream:
                *_, last = events(response.text)
                assert last["error"]["code"] == "request_timeout"
            else:
                assert error_of(response, 504)["code"] == "request_timeout"
            await pages_are_back(server)

    asyncio.run(go())


def begun_answers(server: LocalServer) -> float | None:
    return server.state.metrics.registry.get_sample_value("tandem_http_responses_total", {"status": "200"})


def let_pass(seconds: float) -> None:
    """The event loop's clock jumps: what must come before has come, however busy the machine is."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds


def test_time_that_a_prompt_waits_to_be_read_counts(monkeypatch):
    async def go():
        async with local_server(request_timeout=0.1) as server:

            async def never(*_: object) -> None:
                await asyncio.sleep(60)

            monkeypatch.setattr(server.state.prompts, "encode_all", never)
            error_of(await server.post("/generate", text="x"), 504)
            assert server.state.http_active == 0

    asyncio.run(go())


def test_bodies_of_requests_in_progress_are_bounded():
    """Those of a sleeping engine's requests, too: each is held until its request has ended."""

    async def scenario(server: LocalServer):
        first = asyncio.create_task(server.post("/generate", **ENDLESS, rid="first", padding="x" * 6000))
        await running(server, 1)
        refused = error_of(await server.post("/generate", text="x", padding="x" * 6000), 503)
        alone = error_of(await server.post("/generate", text="x", padding="x" * 20_000), 413)
        assert "--max-queued-bytes" in refused["message"] and "--max-queued-bytes" in alone["message"]
        assert (await server.post("/generate", text="x")).status_code == 200
        await server.post("/abort_request", rid="first")
        await first
        assert (await server.post("/generate", text="x", padding="x" * 6000)).status_code == 200

    run(scenario, max_queued_bytes=10_000)
