"""The supervisor and the client against real engine processes that hold no model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from quiet_clock import PATIENCE
from supervision import answer, engine_path, request, until
from tandem.errors import ConfigError, EngineError, RequestError
from tandem.flags.engine_config import EngineConfig
from tandem.flags.ways import several_gpus_typed, way_is_open
from tandem.server import engine_client, supervisor
from tandem.server.engine_client import EngineClient
from tandem.server.messages import StartEngine, StartFailed, WayChosen
from tandem.server.metrics import ServerMetrics
from tandem.server.supervisor import EngineSupervisor

Supervised = tuple[EngineClient, EngineSupervisor, asyncio.Task[None]]


@pytest.fixture(autouse=True)
def engine_finds_tests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", engine_path())
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.01)


@contextlib.asynccontextmanager
async def supervised(
    loader: str, model: str = "m"
) -> AsyncIterator[tuple[EngineClient, EngineSupervisor, asyncio.Task]]:
    client = EngineClient(ServerMetrics())
    boss = EngineSupervisor(EngineConfig(model=model), client, lambda ready: None, f"idle_engine:{loader}")
    running = asyncio.create_task(boss.run())
    try:
        await until(lambda: client.ready or running.done())
        yield client, boss, running
    finally:
        await boss.stop()
        with contextlib.suppress(EngineError, ConfigError):
            await asyncio.wait_for(running, PATIENCE)


def test_answers_and_clean_stop():
    async def scenario():
        async with supervised("load") as (client, boss, running):
            assert await answer(client, request("a", [1])) == "ok"
            await client.flush_cache()
            assert client.open_answers == 0
        assert running.done() and running.exception() is None
        assert not client.ready and boss.restarts == 0

    asyncio.run(scenario())


def test_an_id_can_be_used_again_but_not_twice_at_once():
    async def scenario():
        async with supervised("load") as (client, _, _):
            stream = client.submit([request("a", [1])])
            with pytest.raises(RequestError):
                client.submit([request("a", [1])])
            client.release(stream)
            assert await answer(client, request("a", [1])) == "ok"
            stream = client.submit([request("a", [1])])
            assert client.abort("a")
            client.release(stream)
            assert await answer(client, request("a", [1])) == "ok"

    asyncio.run(scenario())


def test_a_bug_in_add_fails_that_request_only():
    async def scenario():
        async with supervised("load") as (client, boss, _):
            with pytest.raises(EngineError, match="a bug in add"):
                await answer(client, request("bad", [13]))
            assert await answer(client, request("good", [1])) == "ok"
            assert boss.restarts == 0

    asyncio.run(scenario())


def test_a_bug_in_the_loop_restarts_the_engine():
    async def scenario():
        async with supervised("load") as (client, boss, _):
            with pytest.raises(EngineError, match="exit code 1"):
                await answer(client, request("bad", [14]))
            with pytest.raises(EngineError):
                await answer(client, request("too early", [1]))
            await until(lambda: client.ready)
            assert await answer(client, request("good", [1])) == "ok"
            assert boss.restarts == 1

    asyncio.run(scenario())


def test_pending_flush_ends_with_the_engine():
    async def scenario():
        async with supervised("load") as (client, boss, _):
            os.kill(boss.engine_pid, signal.SIGSTOP)  # it will not answer
            flushing = asyncio.create_task(client.flush_cache())
            await asyncio.sleep(0.05)
            os.kill(boss.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="SIGKILL"):
                await asyncio.wait_for(flushing, 60)

    asyncio.run(scenario())


def test_a_client_that_leaves_before_the_cache_is_flushed_harms_nobody():
    async def scenario():
        async with supervised("load") as (client, boss, _):
            flushing = asyncio.create_task(client.flush_cache())
            await asyncio.sleep(0)  # it is on its way
            flushing.cancel()
            assert await answer(client, request("a", [1])) == "ok"
            await client.flush_cache()
            assert boss.restarts == 0

    asyncio.run(scenario())


def test_gives_up_after_repeated_failures_to_start(tmp_path: Path):
    async def scenario():
        async with supervised("load_once", str(tmp_path / "marker")) as (client, boss, running):
            os.kill(boss.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="the model went away"):
                await asyncio.wait_for(running, 120)
            assert boss.restarts == supervisor.START_ATTEMPTS
            assert not client.ready

    asyncio.run(scenario())


def test_a_first_start_that_fails_is_not_repeated(tmp_path: Path):
    marker = tmp_path / "marker"
    marker.touch()

    async def scenario():
        async with supervised("load_once", str(marker)) as (_, boss, running):
            with pytest.raises(ConfigError, match="the model went away"):
                await running
            assert boss.restarts == 0

    asyncio.run(scenario())


def test_why_a_start_failed_is_heard_however_late_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A busy machine reads it after the process would have ended."""
    listen = EngineSupervisor._listen

    async def late(*arguments):
        await asyncio.sleep(0.5)
        await listen(*arguments)

    monkeypatch.setattr(EngineSupervisor, "_listen", late)
    monkeypatch.setattr(supervisor, "LAST_WORDS_SECONDS", 0.0)
    (marker := tmp_path / "marker").touch()

    async def scenario():
        async with supervised("load_once", str(marker)) as (_, _, running):
            with pytest.raises(ConfigError, match="the model went away"):
                await running

    asyncio.run(scenario())


@pytest.mark.parametrize("times", [1, 2])
def test_an_engine_that_is_killed_once_while_it_loads_is_started_once_more(tmp_path: Path, times: int):
    marker = tmp_path / "marker"
    marker.write_text(str(times))

    async def scenario():
        async with supervised("load_killed", str(marker)) as (client, boss, running):
            if times == 1:
                assert await answer(client, request("a", [1])) == "ok"
            else:
                with pytest.raises(EngineError, match="ended at start .SIGKILL: perhaps memory ran out"):
                    await running
            assert boss.restarts == 1

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_attended_is_killed():
    """A tokenizer that cannot be read, say: the error surfaces instead of a server that is never ready."""

    async def scenario():
        def no_tokenizer(ready):
            raise RequestError("no tokenizer")

        client = EngineClient(ServerMetrics())
        boss = EngineSupervisor(EngineConfig(model="m"), client, no_tokenizer, "idle_engine:load")
        with pytest.raises(EngineError, match="no tokenizer"):
            await asyncio.wait_for(boss.run(), 60)

    asyncio.run(scenario())


def test_an_engine_that_dies_while_it_is_attended_is_not_killed_again(monkeypatch: pytest.MonkeyPatch):
    """What went wrong is said, not that there is no process any more."""
    monkeypatch.setattr(supervisor, "LAST_WORDS_SECONDS", PATIENCE)

    async def scenario():
        def no_tokenizer(ready):
            os.kill(boss.engine_pid, signal.SIGKILL)
            while Path(f"/proc/{boss.engine_pid}").exists():
                time.sleep(0.01)
            time.sleep(0.1)  # until the loop has heard of it
            raise RequestError("no tokenizer")

        client = EngineClient(ServerMetrics())
        boss = EngineSupervisor(EngineConfig(model="m"), client, no_tokenizer, "idle_engine:load")
        with pytest.raises(EngineError, match="no tokenizer"):
            await asyncio.wait_for(boss.run(), 60)

    asyncio.run(scenario())


def test_a_restart_for_which_there_is_no_process_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    async def scenario():
        async with supervised("load") as (client, boss, running):
            spawn, failures = asyncio.create_subprocess_exec, iter(range(2))

            async def scarce(*command, **options):
                if next(failures, None) is not None:
                    raise BlockingIOError(11, "Resource temporarily unavailable")
                return await spawn(*command, **options)

            monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
            os.kill(boss.engine_pid, signal.SIGKILL)
            await until(lambda: boss.restarts == 3 or running.done())
            await until(lambda: client.ready or running.done())
            assert await answer(client, request("a", [1])) == "ok"

    asyncio.run(scenario())


@pytest.mark.parametrize("raised", [OSError(12, "Cannot allocate memory"), EngineError("no socket can be made")])
def test_a_first_start_without_a_process_says_why(monkeypatch: pytest.MonkeyPatch, raised: Exception):
    async def scenario():
        async def none(*command, **options):
            raise raised

        monkeypatch.setattr(asyncio, "create_subprocess_exec", none)
        boss = EngineSupervisor(EngineConfig(model="m"), EngineClient(ServerMetrics()), lambda ready: None)
        with pytest.raises(EngineError, match="Cannot allocate memory|no socket"):
            await asyncio.wait_for(boss.run(), 60)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("of_gpus", "why"),
    [(True, "^it does not fit; --pp 2 was chosen and did not start: no GPU 1$"), (False, "^no GPU 1$")],
)
def test_a_chosen_way_is_left_unless_another_flag_was_refused(monkeypatch, of_gpus: bool, why: str):
    """The last error keeps the reason of ways that were left: with one GPU a model may not fit at all."""
    boss = EngineSupervisor(EngineConfig(model="m"), EngineClient(ServerMetrics()), lambda ready: None)
    starts = iter([
        (WayChosen(ranks=1, stages=2, flag="--pp 2"), StartFailed(message="no GPU 1", refused=True, of_gpus=of_gpus)),
        (None, StartFailed(message="it does not fit", refused=True)),
    ])  # fmt: skip

    async def fails() -> supervisor._EngineLife:
        boss._way, error = next(starts)
        boss._start_failed, boss._start_error = error, error.message
        return supervisor._EngineLife.NEVER_READY

    monkeypatch.setattr(boss, "_one_life", fails)
    with pytest.raises(ConfigError, match=why):
        asyncio.run(boss.run())


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (4, 1), (1, 2)])
def test_a_restart_takes_the_way_of_the_engine_that_was_ready_as_no_flag(ranks: int, stages: int):
    """So it plans with what other servers leave of the GPUs, as the first start did."""
    boss = EngineSupervisor(EngineConfig(model="m"), EngineClient(ServerMetrics()), lambda ready: None)
    boss._way = WayChosen(ranks=ranks, stages=stages, flag="")
    boss._keep_way()
    start = engine_client.encode(StartEngine(config=boss._config, loader=supervisor.REAL_ENGINE))
    config = msgspec.msgpack.decode(start, type=StartEngine).config
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (ranks, stages)
    assert not way_is_open(config) and not several_gpus_typed(config)
