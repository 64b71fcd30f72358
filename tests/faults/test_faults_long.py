"""Faults that take longer than `make test` has: watchdogs, crash loops, thousands of connections and aborts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import httpx
import psutil
import pytest
from fault_servers import (
    ENGINE,
    answer,
    body,
    child,
    error_of,
    fault_model,
    good_answer,
    idle,
    long_answers,
    spawn_kt,
    wait_until,
)
from fault_table import Fault
from faulty_engine import command

from quiet_clock import QuietClock
from server_harness import ServerProcess, plain, running
from tandem.server.limits import MAX_OPEN_ANSWERS

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
WATCHDOG, RESTART_SECONDS = 5.0, 60.0
ABORTED, AT_ONCE = 10_000, 64
CONNECTIONS = 10_000
FLOOD = MAX_OPEN_ANSWERS + 500
MOST_GROWTH_BYTES = 48 << 20  # of a process, over all that is aborted


@pytest.fixture(scope="module")
def shared(tiny_models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("long-faults")
    model = fault_model(tiny_models["qwen3_moe"], folder / "model")
    flags = "--watchdog-timeout", str(WATCHDOG)
    with running(spawn_kt(model, folder / "log", *flags, faulty=True)) as found:
        yield found


@pytest.fixture
def server(shared: ServerProcess) -> ServerProcess:
    shared.wait_until_ready()
    return shared


@pytest.fixture(scope="module")
def expected(shared: ServerProcess) -> list[int]:
    return answer(shared)


@pytest.mark.fault("10,000 requests whose clients leave in the midst of an answer")
def test_aborted_requests(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """Their pages come back, and no process grows."""
    processes = [psutil.Process(server.process.pid), child(server, ENGINE)]
    asyncio.run(leave(server, 1000))  # what grows once is there
    wait_until(lambda: idle(server))
    before = [process.memory_info().rss for process in processes]
    fault.strikes()
    asyncio.run(leave(server, ABORTED))
    clock = QuietClock()
    assert answer(server) == expected
    assert clock.seconds() < 10
    fault.seen("nothing: others go on, and all pages come back")
    fault.good(600)
    wait_until(lambda: idle(server))
    growth = [process.memory_info().rss - b for process, b in zip(processes, before, strict=True)]
    assert max(growth) < MOST_GROWTH_BYTES, growth
    assert server.info()["stats"]["aborted_requests"] >= ABORTED * 0.9  # some ends come before the client goes


async def leave(server: ServerProcess, count: int) -> None:
    """Each reads the first bytes of its answer."""
    gate = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:

        async def one(i: int) -> None:
            async with gate, http.stream("POST", "/generate", json=body(500, i % 90, stream=True)) as response:
                assert response.status_code == 200
                async for _ in response.aiter_raw():
                    return

        await asyncio.gather(*(one(i) for i in range(count)))


@pytest.mark.fault("10,000 connections that send nothing")
def test_connections_that_say_nothing(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    async def connect() -> None:
        port, open_now = int(server.url.rpartition(":")[2]), []
        try:
            for _ in range(CONNECTIONS):
                open_now.append((await asyncio.open_connection("127.0.0.1", port))[1])
            fault.seen("nothing: each is closed after 20 seconds")
            assert await asyncio.to_thread(answer, server) == expected
            fault.good(120)
        finally:
            for writer in open_now:
                writer.close()
            for writer in open_now:
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    fault.strikes()
    asyncio.run(connect())
    assert server.healthy()


@pytest.mark.fault("More requests than may wait (4,096)")
def test_a_flood(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    async def flood() -> Counter[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:

            async def one(i: int) -> int:
                answered = await http.post("/generate", json=body(20, i % 90))
                if answered.status_code == 429:
                    assert answered.headers["retry-after"] and error_of(answered)["code"] == "overloaded"
                return answered.status_code

            asked = []
            for i in range(FLOOD):  # some at a time, or a busy client has connections that it sends nothing on
                asked.append(asyncio.create_task(one(i)))
                await asyncio.sleep(0.05 if i % 128 == 0 else 0.0)
            return Counter(await asyncio.gather(*asked))

    fault.strikes()
    statuses = asyncio.run(flood())
    fault.seen("429 `overloaded` with `Retry-After` for those that are too many; the others are answered")
    assert answer(server) == expected
    fault.good(600)
    assert set(statuses) <= {200, 429} and statuses[200] >= FLOOD - MAX_OPEN_ANSWERS, statuses
    wait_until(lambda: idle(server))


@pytest.mark.fault("The engine's process stands still (SIGSTOP; `--watchdog-timeout 5`)")
def test_the_engine_stands_still(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    engine = child(server, ENGINE)
    with long_answers(server, 4) as asked:
        fault.strikes()
        engine.suspend()
        errors = [error_of(one.result()) for one in asked]
        fault.seen("503, in a stream an error event: “it was stuck for …, --watchdog-timeout is 5”", WATCHDOG + 4)
    assert all("--watchdog-timeout" in error["message"] for error in errors)
    assert good_answer(server) == expected
    fault.good(WATCHDOG + RESTART_SECONDS)


@pytest.mark.fault("A request that kills the engine, sent again and again")
def test_a_request_that_kills_the_engine(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """Each start waits longer than the one before, so that the machine has time for others."""
    restarts = server.info()["engine_restarts"]
    fault.strikes()
    for i in range(3):
        refused = plain.post(server.url + "/generate", json=body(4, ids=command("crash!")), timeout=60)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        if not i:
            fault.seen("503 with `Retry-After`; the next start waits 0, 1, 2, 4 … seconds", 5)
        assert good_answer(server) == expected
    fault.good(4 * RESTART_SECONDS)
    assert server.info()["engine_restarts"] == restarts + 3
    said = server.log.read_text()
    assert "times in a row; next start in 1 s" in said or "next start in 2 s" in said
