"""Models on Ray Serve, on this machine: a replica that dies loses no request without an error, and repeats no token."""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make test-ray", allow_module_level=True)

from ray_cluster import Cluster, body_of, cluster, event_of, kill_replica, wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
REQUESTS, CLIENTS, KILLS = 1000, 8, 12


@pytest.fixture(scope="module")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("stubs")) as here:
        yield here


def numbers(events: list) -> list[int]:
    return [event["number"] for event in events if isinstance(event, dict) and "number" in event]


def errors(events: list) -> list[str]:
    return [event["error"]["message"] for event in events if isinstance(event, dict) and "error" in event]


def test_two_models_by_name(ray_here: Cluster, tmp_path: Path):
    secret = tmp_path / "key"
    secret.write_text("sesame")
    ray_here.run("/models/a", {"model": "/models/b", "aliases": ["gpt-4o"], "gpus": 1}, api_key_file=str(secret))
    assert ray_here.chat("a").status_code == 401
    ray_here.client.headers["authorization"] = "Bearer sesame"
    for name in ("a", "b"):
        assert ray_here.chat(name, "hello").json()["model"] == name
        with ray_here.stream(name, "three") as events:
            assert numbers(list(events)) == [0, 1, 2]
    assert ray_here.chat("gpt-4o").json()["model"] == "b"
    assert [card["id"] for card in ray_here.client.get("/v1/models").json()["data"]] == ["a", "b"]
    unknown, unsaid, other = ray_here.chat("c"), ray_here.chat(None), ray_here.client.get("/get_server_info")
    assert (unknown.status_code, unsaid.status_code, other.status_code) == (404, 400, 404)
    assert "'a', 'b'" in unknown.json()["error"]["message"]
    assert ray_here.client.get("/health").json() == {"status": "ok"}
    assert b"tandem_front_http_responses_total" in ray_here.client.get("/metrics").content


def test_equal_beginnings_go_to_one_replica(ray_here: Cluster):
    ray_here.run("/models/a", min=2, max=2)
    wait_until(lambda: len(ray_here.pids("a")) == 2)
    by_prompt = {
        text: {ray_here.chat("a", text).json()["pid"] for _ in range(6)} for text in map(str, range(12))
    }
    assert all(len(pids) == 1 for pids in by_prompt.values())
    assert len(set.union(*by_prompt.values())) == 2


def test_a_replica_that_dies_in_mid_stream_ends_it_with_one_error(ray_here: Cluster):
    ray_here.run("/models/a", min=2, max=2)
    with ray_here.stream("a", "count 2000 0.05") as events:
        first = next(events)
        killed = kill_replica(first["pid"])
        rest = list(events)
    print(f"the error came after {time.monotonic() - killed:.3f} s")
    assert numbers([first, *rest]) == list(range(len(rest) - 1))
    assert len(errors(rest)) == 1 and "try again" in errors(rest)[0] and rest[-1] == "[DONE]"
    assert ray_here.chat("a").status_code == 200
    wait_until(lambda: len(ray_here.pids("a")) == 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_dies_before_its_answer_is_not_noticed(ray_here: Cluster, stream: bool):
    ray_here.run("/models/a", min=2, max=2)
    for name in ("go", "a.held"):
        (ray_here.folder / name).unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ray_here.chat, "a", "hold", stream=stream)
        wait_until(lambda: ray_here.held("a"))
        (pid,) = ray_here.held("a")
        kill_replica(pid)
        wait_until(lambda: len(ray_here.held("a")) == 2)
        (ray_here.folder / "go").touch()
        answer = asked.result()
    assert answer.status_code == 200 and pid not in ray_here.held("a")[1:]
    assert answer.text.count("data: {") == 3 if stream else answer.json()["pid"] == ray_here.held("a")[1]


def test_more_replicas_come_with_more_requests(ray_here: Cluster, monkeypatch: pytest.MonkeyPatch):
    from tandem.ray import application

    monkeypatch.setattr(application, "UP_SECONDS", 0.5)
    ray_here.run({"model": "/models/grows", "max_running_requests": 1}, min=1, max=2)
    assert len(ray_here.pids("grows")) == 1
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ray_here.chat, "grows", "count 200 0.1", stream=True) for _ in range(3)]
        wait_until(lambda: len(ray_here.pids("grows")) == 2)
        assert [each.result().text.count("data: {") for each in asked] == [200] * 3


def test_an_update_loses_nothing(ray_here: Cluster):
    ray_here.run("/models/a", min=2, max=2)
    before, stop, said = set(ray_here.pids("a")), threading.Event(), list[httpx.Response]()

    def ask() -> None:
        while not stop.is_set():
            said.append(ray_here.chat("a", str(random.random())))

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        ray_here.run({"model": "/models/a", "context_length": 4096}, min=2, max=2)
        wait_until(lambda: len(ray_here.pids("a")) == 2 and not before & set(ray_here.pids("a")))
        stop.set()
        for each in asking:
            each.result()
    assert said and {answer.status_code for answer in said} == {200}


def test_a_thousand_requests_under_kills(ray_here: Cluster):
    """Each is whole, or ends with one error; no event comes twice."""
    ray_here.run("/models/a", min=2, max=2)
    chosen = random.Random(0)
    whole, broken, refused = [], [], []

    def one(number: int) -> None:
        body = body_of("a", "count 5 0.01" if number % 2 else str(number))
        body |= {"stream": bool(number % 2), "prompt_cache_key": str(number)}
        answer = ray_here.client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            assert answer.status_code == 503 and answer.json()["error"]["message"]
            refused.append(number)
        elif not number % 2:
            assert answer.json()["said"] == str(number)
            whole.append(number)
        else:
            events = [event_of(line) for line in answer.text.split("\n\n") if line.startswith("data: ")]
            assert numbers(events) == list(range(len(numbers(events))))
            assert events[-1] == "[DONE]" and events.count("[DONE]") == 1 and len(errors(events)) <= 1
            assert errors(events) or len(numbers(events)) == 5
            (broken if errors(events) else whole).append(number)

    def kill_now_and_then(done: threading.Event) -> None:
        for nth in range(1, KILLS + 1):
            wait_until(lambda nth=nth: done.is_set() or len(whole) > nth * REQUESTS // (KILLS + 2))
            if (pids := ray_here.pids("a")) and not done.is_set():
                kill_replica(chosen.choice(pids))

    done = threading.Event()
    killing = threading.Thread(target=kill_now_and_then, args=(done,))
    killing.start()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(REQUESTS)))
    done.set()
    killing.join()
    print(f"{len(whole)} whole, {len(broken)} ended with an error, {len(refused)} refused, {KILLS} kills")
    assert sorted([*whole, *broken, *refused]) == list(range(REQUESTS))
    assert len(whole) > 0.9 * REQUESTS
