"""What must keep an engine awake, or must not wait for its sleep: one process, whose engine sleeps only on paper."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from quiet_clock import PATIENCE
from server_harness import LocalServer
from server_requests import error_of, run, user
from supervision import until
from tandem.engine.protocol import EngineStats, ExpertsRecorded, ExpertTraffic
from tandem.errors import EngineError
from tandem.server.chat.model import ChatModel
from tandem.server.engine_client import EngineClient
from tandem.server.messages import CacheFlushed, FromEngine
from tandem.server.metrics import ServerMetrics
from tandem.server.prompts.reader import PromptReader

LONG = 3600.0
A_WHILE = 0.02  # seconds in which a timer of no seconds rings
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": user("x")}, "/v1/completions": {"prompt": "x"}, "/generate": {"text": "x"},
    "/v1/messages": {"messages": user("x"), "max_tokens": 9}, "/v1/responses": {"input": "x"},
    "/api/chat": {"messages": user("x")}, "/api/generate": {"prompt": "x", "raw": True},
}  # fmt: skip


@contextlib.contextmanager
def due_of(client: EngineClient) -> Iterator[Callable[[], bool]]:
    """Whether the supervisor would end the engine."""
    due = asyncio.ensure_future(client.sleep.until_due())
    try:
        yield due.done
    finally:
        due.cancel()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Prompts are read only once it is set."""
    gate = asyncio.Event()
    for kind, name in ((ChatModel, "prepare"), (PromptReader, "encode_all")):

        def slow(*args: Any, read: Any = getattr(kind, name), **named: Any) -> Any:
            async def reading() -> Any:
                await gate.wait()
                return await read(*args, **named)

            return reading()

        monkeypatch.setattr(kind, name, slow)
    return gate


@pytest.mark.parametrize("path", ASKS)
def test_a_prompt_that_is_being_read_keeps_it_awake(path: str, held: asyncio.Event):
    async def scenario(server: LocalServer):
        client = server.state.client
        client.sleep.loaded()
        with due_of(client) as due:
            answer = asyncio.create_task(server.post(path, **ASKS[path]))
            await until(lambda: client._admitted)
            client.sleep.soon()
            await asyncio.sleep(A_WHILE)
            fell_asleep, submitted = due(), client.open_answers
            held.set()  # first: else a failure would wait for it
            assert not fell_asleep and not submitted
            assert (await answer).status_code == 200
            await until(due)
            assert not client._admitted

    run(scenario, sleep_idle_seconds=LONG)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_keep_alive_counts_once_the_prompt_is_answered(path: str, stream: bool, held: asyncio.Event):
    async def scenario(server: LocalServer):
        client = server.state.client
        client.sleep.loaded()
        with due_of(client) as due:
            answer = asyncio.create_task(server.post(path, **ASKS[path], stream=stream, keep_alive=0))
            await until(lambda: client._admitted)
            await asyncio.sleep(A_WHILE)
            fell_asleep, left = due(), client.sleep.seconds_left
            held.set()
            assert not fell_asleep and left > 0
            assert (await answer).status_code == 200
            await until(due)

    run(scenario, sleep_idle_seconds=LONG)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_body_that_is_refused_unloads_nothing(path: str):
    async def scenario(server: LocalServer):
        client = server.state.client
        client.sleep.loaded()
        with due_of(client) as due:
            for more in ({"options": {"temperature": -1}}, {"format": "xml"}):
                error = await server.post(path, **ASKS[path], **more, keep_alive=0)
                assert error.status_code == 400, more
            for many in (10**400, -(10**400)):
                error = await server.post(path, **ASKS[path], keep_alive=many)
                assert error.status_code == 400 and "keep_alive" in error.json()["error"]
            await asyncio.sleep(A_WHILE)
            assert not due() and client.sleep.seconds_left > 1 and not client._admitted

    run(scenario, sleep_idle_seconds=LONG)


# --- messages between client and engine


@contextlib.asynccontextmanager
async def attached(seconds: float = LONG) -> AsyncIterator[tuple[EngineClient, Callable[[], bool]]]:
    client = EngineClient(ServerMetrics(), seconds)
    client.sleep.loaded()
    client.attach(lambda message: None)
    with due_of(client) as due:
        yield client, due


async def told(client: EngineClient, action: Any, message: ExpertsRecorded) -> ExpertsRecorded:
    asked = asyncio.create_task(client.record_experts(action))
    await until(lambda: client._recordings)
    client.deliver(message)
    return await asked


def test_a_recording_keeps_it_awake_until_it_is_written():
    async def scenario():
        async with attached() as (client, due):
            before = client.sleep._used_at
            await told(client, "start", ExpertsRecorded(recording=True))
            assert client.sleep._used_at > before
            client.sleep.soon()
            await told(client, "stop", ExpertsRecorded(recording=False, passes=3))
            await asyncio.sleep(A_WHILE)
            assert not due()
            with contextlib.suppress(Exception):
                await told(client, "dump", ExpertsRecorded(error="the disk is full", fault="engine"))
            await asyncio.sleep(A_WHILE)
            assert not due()  # the next dump tries again
            await told(client, "dump", ExpertsRecorded(passes=3, file="f"))
            await until(due)

    asyncio.run(scenario())


def test_questions_keep_it_awake_until_they_are_answered():
    async def scenario():
        for ask, message in (
            (lambda client: client.look_at_experts(), ExpertTraffic()),
            (lambda client: client.record_experts("dump"), ExpertsRecorded(error="nothing", fault="request")),
        ):
            for leaves in (False, True):
                async with attached() as (client, due):
                    asked = asyncio.create_task(ask(client))
                    await until(lambda: client._looks or client._recordings)
                    if leaves:
                        asked.cancel()
                    client.sleep.soon()
                    await asyncio.sleep(A_WHILE)
                    assert not due()
                    client.deliver(message)
                    await until(due)
                    await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(scenario())


LATE: list[FromEngine] = [
    ExpertTraffic(), CacheFlushed(), ExpertsRecorded(recording=True), EngineStats(running=3),
]  # fmt: skip


@pytest.mark.parametrize("message", LATE)
def test_what_an_ending_engine_still_says_is_not_heard(message: FromEngine):
    async def scenario():
        async with attached() as (client, _):
            flush = asyncio.create_task(client.flush_cache())
            look = asyncio.create_task(client.look_at_experts())
            await until(lambda: client._looks)
            client.fall_asleep()
            client.deliver(message)
            assert client.stats == EngineStats() and not client.holds_recording
            assert await flush is None
            with pytest.raises(EngineError, match="asleep"):
                await look

    asyncio.run(scenario())


# --- release and resume


@contextlib.asynccontextmanager
async def releasing(server: LocalServer) -> AsyncIterator[asyncio.Task[Any]]:
    """`/release_memory_occupation` waits for a request that runs."""
    client = server.state.client
    client.sleep.loaded()
    client.sleep.released.clear()
    with client.admitted():
        release = asyncio.create_task(server.post("/release_memory_occupation"))
        await until(lambda: client.sleep.seconds_left == 0)
        assert not release.done()
        yield release


def test_a_recording_is_not_released():
    async def scenario(server: LocalServer):
        client = server.state.client
        client.sleep.loaded()
        client.holds_recording = True
        refused = error_of(await server.post("/release_memory_occupation"), 400)
        assert "/dump_expert_distribution_record" in refused["message"] and client.sleep.seconds_left > 0

    run(scenario)


def test_a_drain_does_not_wait_for_a_release():
    async def scenario(server: LocalServer):
        async with releasing(server) as release:
            server.state.drains.set()
            assert "shutting down" in error_of(await asyncio.wait_for(release, PATIENCE), 503)["message"]

    run(scenario)


def resume(server: LocalServer) -> Any:
    return server.post("/resume_memory_occupation", tags=[])


def load(server: LocalServer) -> Any:
    return server.post("/api/generate", prompt="")


def record(server: LocalServer) -> Any:
    return server.post("/start_expert_distribution_record")


@pytest.mark.parametrize("later", [resume, load, record])
def test_a_later_word_takes_a_release_back(later: Callable[[LocalServer], Any]):
    async def scenario(server: LocalServer):
        client = server.state.client
        async with releasing(server) as release:
            before = client.sleep._used_at
            asked = asyncio.ensure_future(later(server))
            assert error_of(await asyncio.wait_for(release, PATIENCE), 409)["code"] == "resumed"
            assert client.sleep._used_at > before
            await asked
        with due_of(client) as due:
            await asyncio.sleep(A_WHILE)
            assert not due() and client.sleep.seconds_left > 1

    run(scenario, sleep_idle_seconds=LONG)


def test_no_tags_are_all():
    async def scenario(server: LocalServer):
        assert (await server.post("/release_memory_occupation", tags=[])).json() == {"status": "sleeping"}
        error_of(await server.post("/release_memory_occupation", tags=["kv_cache"]), 400)

    run(scenario)


def test_a_server_that_drains_is_not_shown_as_asleep():
    async def scenario(server: LocalServer):
        async def shown() -> dict[str, Any]:
            return (await server.client.get("/tandem/live")).json()["engine"]

        server.state.client.fall_asleep()
        assert (await shown())["asleep"]
        server.state.drains.set()
        asleep = await shown()
        assert not asleep["asleep"] and "shutting down" in asleep["why_down"]
        server.state.client.attach(lambda message: None)
        awake = await shown()
        assert not awake["asleep"] and not awake["up"] and "shutting down" in awake["why_down"]

    run(scenario)
