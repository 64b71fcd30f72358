"""Several models behind one address, each a process: here stubs that hold no model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fronts import Front, entry, events, front
from supervision import until
from tandem.errors import EngineError
from tandem.flags.engine_config import EngineConfig
from tandem.server import supervisor
from tandem.server.front import proxy
from tandem.server.front.app import FrontApp
from tandem.server.front.child import Life
from tandem.server.front.dialects import wish_of
from tandem.server.front.launch import greeting
from tandem.server.front.models_file import ModelsFile
from tandem.server.front.room import Verdict
from tandem.server.guard import half_closed
from tandem.server.limits import MAX_BODY_BYTES


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.01)


def served(*names: str) -> list:
    return [entry(name) for name in names]


def test_a_hundred_requests_of_three_models_with_room_for_two():
    """Each in its turn, four times: every change of turn is a load, which takes half a second."""

    async def scenario():
        async with front(*served("a", "b", "c")) as at:
            for number in range(100):
                name = "aaaabbbbcccc"[number % 12]
                answer = (await at.chat(name, f"{number}")).json()
                assert (answer["model"], answer["said"]) == (name, f"{number}")
                assert len(at.models.loaded()) <= 2
            assert max(at.room.seen) == 2
        assert sum(child.loads for child in at.models.all()) > 10
        assert all(child.pid is None for child in at.models.all())

    asyncio.run(scenario())


def test_many_at_once_are_all_answered():
    """200 clients of three models, half of them streams, with room for two."""

    async def scenario():
        async with front(*served("a", "b", "c")) as at:
            at.client._transport._pool._max_connections = 200
            asked = [at.chat("abc"[n % 3], f"{n}", stream=n % 2 == 0) for n in range(200)]
            for n, answer in enumerate(await asyncio.gather(*asked)):
                assert answer.status_code == 200
                if n % 2:
                    assert (answer.json()["model"], answer.json()["said"]) == ("abc"[n % 3], f"{n}")
                else:
                    *said, done = events(answer)
                    assert [one["number"] for one in said] == [0, 1, 2] and done == "[DONE]"
                    assert {one["model"] for one in said} == {"abc"[n % 3]}

    asyncio.run(scenario())


def test_the_least_used_goes_when_its_requests_are_answered():
    async def scenario():
        async with front(*served("a", "b", "c")) as at:
            halted = asyncio.create_task(at.chat("a", "halt", stream=True))
            await until(lambda: at.log("a") == ["began"] and at.models.named("a").life is Life.LOADED)
            await at.chat("b")
            waits = asyncio.create_task(at.chat("c"))
            await until(lambda: at.models.named("a").life is Life.DRAINING)
            comes_back = asyncio.create_task(at.chat("a"))
            assert (await at.chat("b")).status_code == 200  # others go on
            assert not waits.done() and not comes_back.done()
            (at.folder / "go").touch()
            assert events(await halted)[-1] == "[DONE]"
            assert (await waits).json()["model"] == "c"
            assert (await comes_back).json()["model"] == "a"
            assert at.log("a") == ["began", "ended", "began"]

    asyncio.run(scenario())


def test_a_model_stays_a_while():
    async def scenario():
        async with front(*served("a", "b"), places=1, stay_seconds=3600.0) as at:
            await at.chat("a")
            waits = asyncio.create_task(at.chat("b"))
            await until(lambda: len(at.room.seen) == 2)
            assert (await at.chat("a")).json()["model"] == "a" and at.models.named("a").loads == 1
            waits.cancel()

    asyncio.run(scenario())


def test_a_stream_says_that_it_waits(monkeypatch: pytest.MonkeyPatch):
    async def scenario():
        async with front(*served("a", "huge")) as at:
            monkeypatch.setattr(proxy, "WAITING_SECONDS", 0.0)
            monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.0)  # or the next is refused at once
            *waits, first, _, _, done = events(await at.chat("a", stream=True))
            assert waits and set(waits) == {": waiting"} and first["number"] == 0 and done == "[DONE]"
            ask = {"model": "huge", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 1}
            *_, error, done = events(await at.client.post("/v1/chat/completions", json=ask))
            assert "99 GiB" in error["error"]["message"] and done == "[DONE]"
            said = (await at.client.post("/v1/messages", json=ask)).text
            assert "event: error\ndata: " in said and "99 GiB" in said and "[DONE]" not in said
            lines = (await at.client.post("/api/chat", json=ask)).text.splitlines()
            assert '"done":false' in lines[0] and "99 GiB" in lines[-1]

    asyncio.run(scenario())


def test_a_client_that_leaves_is_aborted_in_its_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(half_closed, "QUIET_SECONDS", 0.2)

    async def scenario():
        async with front(*served("a")) as at:
            for count, stream in enumerate((True, False), 1):
                asked = asyncio.create_task(at.chat("a", "halt", stream=stream))
                await until(lambda count=count: len(at.log("a", "halted")) == count)
                assert at.models.named("a").in_flight == 1
                asked.cancel()
                await until(lambda count=count: at.log("a").count("left") == count)
                await until(lambda: at.models.named("a").in_flight == 0)

    asyncio.run(scenario())


def test_a_client_that_leaves_stops_no_load():
    async def scenario():
        async with front(*served("a")) as at:
            asked = asyncio.create_task(at.chat("a"))
            await until(lambda: at.models.named("a").life is Life.LOADING)
            asked.cancel()
            await until(lambda: at.models.named("a").life is Life.LOADED)
            await until(lambda: at.models.named("a").in_flight == 0)
            assert (await at.chat("a")).status_code == 200 and at.models.named("a").loads == 1

    asyncio.run(scenario())


def test_a_process_that_dies_and_one_that_is_killed():
    async def scenario():
        async with front(*served("a")) as at:
            *said, error, done = events(await at.chat("a", "die", stream=True))
            assert said[0]["number"] == 0 and "ended" in error["error"]["message"] and done == "[DONE]"
            assert (await at.chat("a")).status_code == 200
            halted = asyncio.create_task(at.chat("a", "halt"))
            await until(lambda: at.log("a", "halted"))
            os.kill(at.models.named("a").pid, signal.SIGKILL)
            refused = await halted
            assert refused.status_code == 503 and refused.headers["retry-after"]
            while (answer := await at.chat("a")).status_code == 503:  # the pause between tries
                assert "ended (SIGKILL" in answer.json()["error"]["message"]
            assert answer.status_code == 200

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    async def scenario():
        async with front(*served("a", "b", "huge")) as at:
            (at.folder / "a.broken").touch()
            refused = [await at.chat("a") for _ in range(2)]
            assert [r.status_code for r in refused] == [503, 503]
            assert "a cannot be loaded: a needs 99 GiB of 7" in refused[0].json()["error"]["message"]
            listed = (await at.client.get("/v1/models")).json()["data"][0]["status"]
            assert listed["failed"] and "99 GiB" in listed["reason"]
            await until(lambda: at.models.named("a").not_before < time.monotonic())
            monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 3600.0)
            at.models.named("a").failures = 10  # from here on a pause is minutes
            assert "99 GiB" in (await at.chat("a")).text
            again = (await at.chat("a")).json()["error"]["message"]  # at once, without a process
            assert "the next try is in" in again and "99 GiB" in again
            assert (await at.chat("b")).status_code == 200
            assert "it needs 99 GiB of 7" in (await at.chat("huge")).text
            assert at.models.named("b").life is Life.LOADED  # nothing went for what can never fit
            at.models.named("a").not_before = 0.0
            (at.folder / "a.broken").unlink()
            assert (await at.chat("a")).status_code == 200

    asyncio.run(scenario())


def test_names():
    async def scenario():
        async with front(entry("a", aliases=("gpt-4o",)), entry("b")) as at:
            for name in ("a", "a:latest", "gpt-4o", "/models/a"):
                assert (await at.chat(name)).json()["model"] == "a", name
            assert (await at.chat(None)).json()["model"] == "a"  # the only one that is loaded
            unknown = await at.chat("c")
            assert unknown.status_code == 404 and "'a', 'b'" in unknown.json()["error"]["message"]
            await at.chat("b")
            assert (await at.chat(None)).status_code == 400
            assert (await at.client.post("/api/chat", json={"model": "c"})).json()["error"]
            assert (await at.client.post("/v1/messages", json={"model": "c"})).json()["type"] == "error"
            assert (await at.client.post("/v1/completions?model=b", json={"prompt": "x"})).json()["model"] == "b"
            assert (await at.client.post("/upstream/a/v1/completions", json={"prompt": "x"})).json()["model"] == "a"
            for wrong in (b"", b"{", b"[]", b'{"model": 5}'):
                refused = await at.client.post("/v1/chat/completions", content=wrong)
                assert refused.status_code == 400, wrong

    asyncio.run(scenario())


async def listed(at: Front) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in (await at.client.get("/v1/models")).json()["data"]}


def test_who_only_looks_loads_nothing():
    async def scenario():
        async with front(*served("a", "b")) as at:
            looks = [
                "/health", "/metrics", "/v1/models", "/v1/models/a", "/api/tags", "/api/ps", "/running", "/", "/ping",
                "/page/main.js", "/tandem/live", "/tandem/live?model=b", "/api/v0/models", "/api/v0/models/a",
                "/version", "/api/version",
            ]  # fmt: skip
            for path in looks:
                assert (await at.client.get(path)).status_code == 200, path
            shown = await at.client.post("/api/show", json={"model": "a"})
            assert shown.json()["capabilities"] == ["completion", "tools"]
            assert (await at.client.get("/get_server_info?model=a")).status_code == 503
            assert await listed(at) == {"a": "unloaded", "b": "unloaded"}
            assert not (await at.client.get("/tandem/live")).json()["engine"]["up"]
            await at.chat("b")
            assert await listed(at) == {"a": "unloaded", "b": "loaded"}
            assert (await at.client.get("/v1/models/b")).json()["max_model_len"] == 128
            assert [m["name"] for m in (await at.client.get("/api/ps")).json()["models"]] == ["b"]
            assert (await at.client.get("/running")).json() == {"running": [{"model": "b", "state": "ready"}]}
            numbers = (await at.client.get("/metrics")).text
            assert 'tandem_steps_total{model="b"} 5.0' in numbers
            assert 'tandem_front_model_loaded{model="a"} 0.0' in numbers
            assert (await at.client.get("/tandem/live")).json() == {"model": "b"}
            assert (await at.client.post("/abort_request", json={"abort_all": True})).json() == {"aborted": True}

    asyncio.run(scenario())


def test_models_go_when_told_and_by_themselves():
    async def scenario():
        async with front(entry("a", sleep_idle_seconds=3600.0), entry("b")) as at:
            await at.chat("a")
            unload = {"model": "a", "messages": [], "keep_alive": 0}
            assert (await at.client.post("/api/chat", json=unload)).json()["done_reason"] == "unload"
            await until(lambda: at.models.named("a").life is Life.UNLOADED)
            await at.client.post("/models/load", json={"model": "a"})
            assert await listed(at) == {"a": "loaded", "b": "unloaded"}
            await at.client.post("/models/unload", json={"model": "a"})
            assert await listed(at) == {"a": "unloaded", "b": "unloaded"}
            ask = {"model": "a", "prompt": "x", "stream": False, "keep_alive": 0}
            assert (await at.client.post("/api/generate", json=ask)).status_code == 200
            await until(lambda: at.models.named("a").life is Life.UNLOADED)
            await at.client.post("/api/generate", json=ask | {"model": "b"})  # b stays for good
            await at.chat("a")
            assert (await at.client.get("/unload")).text == "OK\n"
            assert not at.models.loaded()

    asyncio.run(scenario())


def test_the_file_is_read_again():
    async def scenario():
        async with front(*served("a", "b", "c"), places=3) as at:
            for name in "abc":
                await at.chat(name)
            halted = asyncio.create_task(at.chat("b", "halt"))
            await until(lambda: at.models.named("b").in_flight == 1)
            other = dataclasses.replace(entry("c"), flags=("--model", "/models/other"))
            renamed = entry("a", aliases=("x",), sleep_idle_seconds=3600.0)
            at.models.replace(ModelsFile((renamed, other, entry("d")), 0.0))
            assert 3000.0 < at.models.named("a").sleep.seconds_left <= 3600.0
            assert (await at.chat("b")).status_code == 404
            (at.folder / "go").touch()
            assert (await halted).json()["model"] == "b"  # it had begun
            assert (await at.chat("x")).json()["model"] == "a" and at.models.named("a").loads == 1
            assert (await at.chat("c")).status_code == (await at.chat("d")).status_code == 200
            await until(lambda: at.log("b")[-1] == "ended" and at.log("c").count("ended") == 1)

    asyncio.run(scenario())


def test_keys_and_origins_are_the_fronts():
    async def scenario():
        async with front(*served("a"), api_key="s3cret") as at:
            assert (await at.chat("a")).status_code == 401 and (await at.client.get("/health")).status_code == 200
            right = {"authorization": "Bearer s3cret", "origin": "https://page.example"}
            ask = {"model": "a", "prompt": "x"}
            answer = await at.client.post("/v1/completions", json=ask, headers=right)
            assert answer.status_code == 200 and len(answer.headers.get_list("x-request-id")) == 1
        async with front(*served("a"), request_timeout=0.1) as at:
            assert (await at.chat("a", "halt")).status_code == 504

    asyncio.run(scenario())


def test_so_many_may_wait_for_a_load():
    async def scenario():
        async with front(*served("a"), max_queued_requests=3) as at:
            all_have_come, check = asyncio.Event(), at.room.check

            async def held(*arguments) -> Verdict:
                await all_have_come.wait()
                return await check(*arguments)

            at.room.check = held
            asked = [asyncio.create_task(at.chat("a")) for _ in range(5)]
            await until(lambda: sum(each.done() for each in asked) == 2)
            all_have_come.set()
            found = [answer.status_code for answer in await asyncio.gather(*asked)]
            assert sorted(found) == [200, 200, 200, 429, 429]
            assert at.models.named("a").waiting == 0 and (await at.chat("a")).status_code == 200

    asyncio.run(scenario())


def test_a_full_body_is_refused_by_the_front():
    async def scenario():
        async with front(*served("a")) as at:
            refused = await at.client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
            assert refused.status_code == 413 and not at.models.named("a").loads

    asyncio.run(scenario())


def test_socket_paths_have_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from tandem.server.front import launch

    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with launch.socket_folder() as folder:
        assert len(str(folder)) < 60 and folder.stat().st_mode & 0o777 == 0o700




@pytest.mark.parametrize("status, kept", [(200, [0.0]), (400, [])])
def test_keep_alive_counts_from_the_answer_and_not_from_a_refusal(status: int, kept: list[float]):
    sent, said = list[str](), list[float]()
    app: Any = FrontApp.__new__(FrontApp)
    child: Any = SimpleNamespace(name="a", sleep=SimpleNamespace(by_itself=True, keep=said.append))

    async def answer(child, scope, send, body, wish) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        assert not said  # the child is still at work
        await send({"type": "http.response.body", "body": b""})

    async def send(message) -> None:
        sent.append(message["type"])

    app._proxy = SimpleNamespace(answer=answer)
    wish = wish_of(b'{"model": "a", "prompt": "x", "keep_alive": 0}')
    asyncio.run(app._answered(child, "/api/generate", {}, None, send, b"", wish))
    assert said == kept and len(sent) == 2


@pytest.mark.parametrize(
    ("path", "first", "last"),
    [
        ("/v1/chat/completions", b'data: {"a": "data: [DONE]"}\n\n', b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: ping\ndata: {"a": "event: message_stop"}\n\n', b"event: message_stop\ndata: {}\n\n"),
        ("/v1/responses", b"event: response.created\ndata: {}\n\n", b"event: response.completed\ndata: {}\n\n"),
        ("/api/chat", b'{"a":",\\"done\\":true","done":false}\n', b'{"a":"","done":true}\n'),
    ],
)
def test_no_error_follows_a_streams_last_event(path: str, first: bytes, last: bytes):
    """A process that dies then has answered. Of an event that is cut, and behind any other, the error is told."""

    async def sent(*parts: bytes) -> bytes:
        said = list[bytes]()

        async def send(message) -> None:
            said.append(message.get("body", b""))

        out = proxy.Out(path, "m", {"app": None}, send, True)
        await out.begin(200, [])
        for part in parts:
            await out.part(part)
        await out.fail(EngineError("it died"))
        return b"".join(said)

    whole = first + last
    halves = [whole[:cut] for cut in range(1, len(whole))]
    assert asyncio.run(sent(whole)) == asyncio.run(sent(*(bytes([each]) for each in whole))) == whole
    assert all(b"it died" in asyncio.run(sent(half)) for half in halves)
    assert b"it died" in asyncio.run(sent(first))


def test_bodies_that_wait_for_a_model_are_bounded():
    """By --max-queued-bytes: in the front's memory, whatever the number of requests. They are let go at their ends."""

    async def scenario():
        async with front(*served("a"), max_queued_bytes=10_000) as at:
            assert (await at.chat("a")).status_code == 200
            halted = asyncio.create_task(at.chat("a", "halt", padding="x" * 6000))
            await until(lambda: at.models.named("a").in_flight == 1)
            refused, alone = await at.chat("a", padding="x" * 6000), await at.chat("a", padding="x" * 20_000)
            assert (refused.status_code, alone.status_code) == (503, 413) and refused.headers["retry-after"]
            assert all("--max-queued-bytes" in each.json()["error"]["message"] for each in (refused, alone))
            assert (await at.chat("a", padding="x" * 1000)).status_code == 200
            (at.folder / "go").touch()
            assert (await halted).status_code == 200
            assert (await at.chat("a", padding="x" * 6000)).status_code == 200

    asyncio.run(scenario())


def test_a_client_that_leaves_lets_its_body_go():
    async def scenario():
        async with front(*served("a"), max_queued_bytes=10_000) as at:
            await at.chat("a")
            leaving = asyncio.create_task(at.chat("a", "halt", padding="x" * 6000))
            await until(lambda: at.models.named("a").in_flight == 1)
            leaving.cancel()
            await until(lambda: at.models.named("a").in_flight == 0)
            assert (await at.chat("a", padding="x" * 6000)).status_code == 200

    asyncio.run(scenario())


def test_the_greeting_s_example_names_one_of_several_models():
    config = EngineConfig(models="stubs")
    several, one = greeting(config, ["a", "b"], 30000), greeting(config, ["a"], 30000)
    assert "a, b are ready at" in several and """-d '{"model": "a", "messages": [""" in several
    assert "a is ready at" in one and """-d '{"messages": [""" in one


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "no such route; /v1/chat/completions is here"),
        ("/v1/v1/messages", "no such route; /v1/messages is here"),
        ("/v1/api/chat", "no such route; /api/chat is here"),
        ("/completion", "no such route: /v1/completions is here"),
        ("/v1/rerank", "no such route: this model writes text, and nothing else"),
    ],
)
def test_a_misspelt_route_is_no_503_of_a_model_that_is_not_loaded(path: str, advice: str):
    async def scenario():
        async with front(*served("a", "b")) as at:
            for body in ({}, {"model": "a"}):
                answer = await at.client.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")
                assert answer.json()["error"]["message"] == advice
            assert at.models.loaded() == []

    asyncio.run(scenario())
