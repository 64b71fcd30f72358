"""An engine that nobody uses ends, and comes back for the next request: supervisor, client and routes of one model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from quiet_clock import PATIENCE
from server_harness import ServerProcess, command_line, has_ended, plain, running, spawn_echo, spawn_real
from supervision import answer, engine_path, request, until
from tandem.errors import ConfigError, EngineError, RequestError
from tandem.flags.engine_config import EngineConfig
from tandem.server import supervisor
from tandem.server.engine_client import ASLEEP, EngineClient
from tandem.server.metrics import ServerMetrics
from tandem.server.ollama.keep_alive import FOR_GOOD, expiry, keep_seconds
from tandem.server.sleep import Sleep
from tandem.server.supervisor import EngineSupervisor

AT_ONCE = 1e-6  # of idle seconds: the engine sleeps whenever nothing runs


@pytest.fixture(autouse=True)
def engine_finds_tests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", engine_path())
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.01)


@contextlib.asynccontextmanager
async def sleeper(
    loader: str = "load", model: str = "m", seconds: float | None = None
) -> AsyncIterator[tuple[EngineClient, EngineSupervisor]]:
    client = EngineClient(ServerMetrics(), seconds)
    boss = EngineSupervisor(EngineConfig(model=model), client, lambda ready: None, f"idle_engine:{loader}")
    task = asyncio.create_task(boss.run())
    try:
        await until(lambda: client.takes_requests or task.done())
        yield client, boss
    finally:
        await boss.stop()
        await asyncio.wait_for(task, PATIENCE)


async def sleeping(client: EngineClient) -> None:
    """Told to, and its process is gone."""
    client.sleep.soon()
    await asyncio.wait_for(client.sleep.released.wait(), PATIENCE)


def test_an_engine_that_sleeps_is_no_process_and_wakes_for_a_request():
    async def scenario():
        async with sleeper() as (client, boss):
            first = psutil.Process(boss.engine_pid)
            await sleeping(client)
            assert has_ended(first)
            assert not client.ready and client.takes_requests and client.why_down == ASLEEP
            assert await answer(client, request("a", [1])) == "ok"
            assert client.ready and boss.engine_pid != first.pid
            assert boss.restarts == 0 and client.sleep.wakes == 1 and client.sleep.wake_seconds > 0

    asyncio.run(scenario())


def test_requests_that_come_while_it_falls_asleep_or_wakes_are_all_answered():
    async def scenario():
        async with sleeper(seconds=AT_ONCE) as (client, boss):
            for turn in range(3):
                answers = [asyncio.create_task(answer(client, request(f"{turn}.{n}", [1]))) for n in range(20)]
                assert await asyncio.gather(*answers) == ["ok"] * 20
                await until(lambda: client.sleep.asleep)
            assert boss.restarts == 0 and client.sleep.wakes >= 2

    asyncio.run(scenario())


def test_it_stays_while_something_runs_and_while_experts_are_recorded():
    async def scenario():
        async with sleeper() as (client, _):
            stream = client.submit([request("a", [1])])  # nobody reads it yet
            client.sleep.soon()
            assert await asyncio.wait_for(stream.next(), PATIENCE) and client.open_answers == 0
            client.holds_recording = True
            client.release(stream)
            due = asyncio.create_task(client.sleep.until_due())
            await asyncio.sleep(0.05)
            assert not due.done() and client.ready
            client.holds_recording = False
            client.sleep.look()
            await asyncio.wait_for(client.sleep.released.wait(), PATIENCE)
            due.cancel()

    asyncio.run(scenario())


def test_a_client_that_leaves_before_the_wake_leaves_nothing_behind():
    async def scenario():
        async with sleeper() as (client, _):
            await sleeping(client)
            gone, stays = client.submit([request("gone", [1])]), client.submit([request("stays", [1])])
            client.release(gone)
            assert client.abort("stays") and [o.finish_reason for o in await stays.next()] == ["abort"]
            client.release(stays)
            assert not client._waiting and client.open_answers == 0
            assert await answer(client, request("a", [1])) == "ok"

    asyncio.run(scenario())


def test_a_wake_that_fails_gives_the_reason_and_the_next_request_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def scenario():
        marker = tmp_path / "marker"
        async with sleeper("load_once", str(marker)) as (client, boss):
            await sleeping(client)
            waiting = [asyncio.create_task(answer(client, request(f"{n}", [1]))) for n in range(3)]
            asked = asyncio.create_task(client.wake())
            for each in (*waiting, asked):
                with pytest.raises(EngineError, match="could not be loaded again: the model went away"):
                    await asyncio.wait_for(each, PATIENCE)
            await until(lambda: client.takes_requests)  # after a pause, which grows
            with pytest.raises(EngineError, match="the model went away"):
                await answer(client, request("again", [1]))
            await until(lambda: client.takes_requests)
            assert "the next request tries again" in caplog.text and "next start" not in caplog.text
            marker.unlink()
            assert await answer(client, request("good", [1])) == "ok"
            assert boss.restarts == 0

    asyncio.run(scenario())


def test_questions_to_an_engine_that_is_asleep():
    async def scenario():
        async with sleeper() as (client, _):
            await sleeping(client)
            await client.flush_cache()
            with pytest.raises(EngineError, match="asleep"):
                await client.look_at_experts()
            assert client.sleep.asleep and not client.sleep.waking
            recording = asyncio.create_task(client.record_experts("start"))  # that is work
            await until(lambda: client.ready)
            recording.cancel()

    asyncio.run(scenario())


def test_stop_while_asleep_and_while_waking():
    async def scenario():
        async with sleeper() as (client, _):
            await sleeping(client)
        async with sleeper() as (client, boss):
            await sleeping(client)
            stream = client.submit([request("a", [1])])
            await until(lambda: not client.sleep.released.is_set())
            await boss.stop()
            with pytest.raises(EngineError, match="stopping"):
                await asyncio.wait_for(stream.next(), PATIENCE)

    asyncio.run(scenario())


def test_what_clients_say_of_how_long_it_stays():
    async def scenario():
        busy = True
        sleep = Sleep(60.0, lambda: busy)
        sleep.loaded()
        sleep.keep(math.inf)
        assert sleep.seconds_left == math.inf and sleep._timer is None
        sleep.keep(0.0)
        due = asyncio.create_task(sleep.until_due())
        await asyncio.sleep(0.01)
        assert not due.done()  # something runs
        busy = False
        sleep.used()
        await asyncio.wait_for(due, PATIENCE)
        sleep.begins()
        assert sleep.asleep and 59.0 < Sleep(60.0, lambda: busy).seconds_left <= 60.0
        assert Sleep(-1, lambda: busy).seconds_left == Sleep(None, lambda: busy).seconds_left == math.inf

    asyncio.run(scenario())


def test_a_probe_is_no_use():
    async def scenario():
        async with sleeper(seconds=60.0) as (client, _):
            before = client.sleep._used_at
            stream = client.submit([request("a", [1])], probe=True)
            await asyncio.wait_for(stream.next(), PATIENCE)
            client.release(stream)
            assert client.sleep._used_at == before
            await answer(client, request("b", [1]))
            assert client.sleep._used_at > before

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (None, None), (0, 0.0), ("0", 0.0), ("0s", 0.0), ("0m0.0s", 0.0), ("-0", 0.0), (300, 300.0), ("5m", 300.0),
        ("1h30m", 5400.0), ("1.5s", 1.5), ("300ms", 0.3), ("90", 90.0), (-1, math.inf), ("-1m", math.inf),
    ],
)  # fmt: skip
def test_durations(said: object, seconds: float | None):
    assert keep_seconds(said) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "said",
    ["", "soon", "5 m", "m", "5x", [5], {}, True, "0" * 50 + "!", "0" * 100_000 + "!", 10**400, -(10**400)],
)
def test_what_is_no_duration(said: object):
    with pytest.raises(RequestError, match="keep_alive"):
        keep_seconds(said)


def test_the_time_of_an_unload_is_a_date():
    assert expiry(math.inf) == expiry(1e300) == FOR_GOOD and expiry(0.0) < expiry(1e9) < FOR_GOOD


def test_no_seconds_at_all_are_refused():
    with pytest.raises(ConfigError, match="sleep-idle-seconds"):
        EngineConfig(model="m", sleep_idle_seconds=0)
    assert EngineConfig(model="m", sleep_idle_seconds=-1).sleep_idle_seconds == -1


# --- over HTTP


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("echo") / "server.log"
    flags = {"sleep_idle_seconds": 3600.0, "max_queued_requests": 5}
    with running(spawn_echo(log, "idle_engine:load_prompts", **flags)) as server:
        yield server
        post(server, "/release_memory_occupation")
        assert server.stop() == 0  # asleep


def post(server: ServerProcess, path: str, **body: object) -> httpx.Response:
    return plain.post(server.url + path, json=body)


def chat(server: ServerProcess, text: str, **more: object) -> httpx.Response:
    return post(server, "/v1/chat/completions", messages=[{"role": "user", "content": text}], **more)


def children(server: ServerProcess) -> int:
    """Engine processes."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    return sum("engine_process" in command_line(child) for child in family)


def sleeps_by_itself(server: ServerProcess) -> None:
    asyncio.run(until(lambda: server.get("/health").json()["status"] == "sleeping"))


def test_release_and_resume(echo: ServerProcess):
    assert post(echo, "/release_memory_occupation", tags=["kv_cache"]).status_code == 400
    assert children(echo) == 1
    for _ in range(2):
        assert post(echo, "/release_memory_occupation").json() == {"status": "sleeping"}
        assert children(echo) == 0
    for _ in range(2):
        assert post(echo, "/resume_memory_occupation", tags=["weights", "kv_cache"]).status_code == 200
        assert children(echo) == 1
    assert echo.get("/health").json() == {"status": "ok"}


LOOKS = (
    "/health", "/ping", "/health_generate", "/metrics", "/tandem/live", "/v1/models", "/api/tags", "/api/ps",
    "/props", "/api/v0/models", "/get_server_info", "/get_model_info", "/get_load", "/", "/api/version",
)  # fmt: skip


def test_who_only_looks_does_not_wake_it(echo: ServerProcess):
    post(echo, "/release_memory_occupation")
    seen = {path: echo.get(path) for path in LOOKS}
    assert {path: r.status_code for path, r in seen.items() if r.status_code != 200} == {}
    assert post(echo, "/tokenize", prompt="ab").json()["count"] and post(echo, "/flush_cache").status_code == 200
    assert children(echo) == 0
    assert seen["/health"].json() == seen["/health_generate"].json() == {"status": "sleeping"}
    assert seen["/v1/models"].json()["data"][0]["status"] == {"value": "sleeping"}
    assert seen["/api/ps"].json() == {"models": []} and len(seen["/api/tags"].json()["models"]) == 1
    assert seen["/props"].json()["is_sleeping"] and seen["/get_server_info"].json()["engine_sleeping"]
    assert seen["/api/v0/models"].json()["data"][0]["state"] == "not-loaded"
    live = seen["/tandem/live"].json()["engine"]
    assert live["asleep"] and not live["up"] and "asleep" in live["why_down"]
    for line in ("tandem_engine_up 0.0", "tandem_engine_sleeping 1.0"):
        assert line in seen["/metrics"].text


def test_each_dialect_wakes_it(echo: ServerProcess):
    said = {"messages": [{"role": "user", "content": "hello"}]}
    asks = {
        "/v1/chat/completions": said, "/v1/completions": {"prompt": "hello"}, "/generate": {"text": "hello"},
        "/v1/messages": said | {"max_tokens": 9}, "/v1/responses": {"input": "hello"}, "/api/chat": said,
        "/api/generate": {"prompt": "hello"},
    }  # fmt: skip
    for path, body in asks.items():
        post(echo, "/release_memory_occupation")
        answered = post(echo, path, **body)
        assert answered.status_code == 200 and '"' in answered.text, path
        assert children(echo) == 1
    assert chat(echo, "hello", stream=True).text.endswith("data: [DONE]\n\n")


def test_so_many_may_wait_for_the_wake(echo: ServerProcess):
    """Places of the engine and --max-queued-requests, and no more."""
    places = echo.info()["plan"]["max_running_requests"] + 5
    post(echo, "/release_memory_occupation")
    assert post(echo, "/v1/completions", prompt="x", n=places + 1).status_code == 400
    with ThreadPoolExecutor(places) as pool:
        some = list(pool.map(lambda n: chat(echo, f"{n}"), range(places)))
    assert [r.status_code for r in some] == [200] * places


def test_ollama_unloads_loads_and_keeps(echo: ServerProcess):
    nothing = {"/api/generate": {"prompt": ""}, "/api/chat": {"messages": []}}
    for (path, body), zero in itertools.product(nothing.items(), (0, "0s")):
        assert post(echo, path, **body, keep_alive=zero).json()["done_reason"] == "unload"
        post(echo, "/release_memory_occupation")  # waits for it
        assert post(echo, path, **body, keep_alive=zero).json()["done_reason"] == "unload"
        assert children(echo) == 0 and echo.get("/api/ps").json() == {"models": []}
        assert post(echo, path, **body).json()["done_reason"] == "load"
        assert children(echo) == 1 and echo.get("/api/ps").json()["models"][0]["expires_at"] < FOR_GOOD
    answered = post(echo, "/api/generate", prompt="x", stream=False, keep_alive="-1m")
    assert "x-tandem-ignored" not in answered.headers
    assert echo.get("/api/ps").json()["models"][0]["expires_at"] == FOR_GOOD
    assert post(echo, "/api/generate", prompt="x", keep_alive="soon").status_code == 400
    assert post(echo, "/api/generate", prompt="x", stream=False, keep_alive=0).json()["response"] == "x"
    sleeps_by_itself(echo)


def test_a_wake_that_fails_is_a_503_with_the_reason(tmp_path: Path):
    gone = tmp_path / "gone"
    with running(spawn_echo(tmp_path / "log", "idle_engine:load_unless_gone", served_model_name=str(gone))) as server:
        post(server, "/release_memory_occupation")
        gone.touch()
        for failed in (chat(server, "x", stream=True), post(server, "/resume_memory_occupation")):
            assert failed.status_code == 503 and "the model went away" in failed.text
            assert failed.headers["retry-after"]
            server.wait_until_ready()  # it takes requests again, after a pause that grows
        gone.unlink()
        assert chat(server, "x").status_code == 200 and server.info()["engine_restarts"] == 0
        post(server, "/release_memory_occupation")
        assert server.stop() == 0


def test_a_real_model_answers_the_same_after_a_sleep(tiny_models, tmp_path: Path):
    ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    with running(spawn_real(tiny_models["qwen3_moe"], tmp_path / "log", "--sleep-idle-seconds", "0.2")) as server:
        answers = []
        for _ in range(2):
            answers.append(post(server, "/v1/chat/completions", **ask).json()["choices"])
            sleeps_by_itself(server)
            post(server, "/release_memory_occupation")
            assert children(server) == 0
        assert answers[0] == answers[1]
        assert server.stop() == 0
