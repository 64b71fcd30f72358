"""smg, the gateway that came after sglang-router, in front of two servers: answers, streams, health, least load."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from server_harness import ServerProcess, free_port, running, spawn_echo

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SMG = shutil.which("smg") or shutil.which("smg", path=str(Path(sys.executable).parent))
if SMG is None:
    pytest.skip("smg is not installed", allow_module_level=True)



@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    folder = tmp_path_factory.mktemp("servers")
    with running(spawn_echo(folder / "a.log")) as one, running(spawn_echo(folder / "b.log")) as other:
        yield [one, other]


@pytest.fixture(scope="module")
def gateway(servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it has found both servers."""
    port, log = free_port(), tmp_path_factory.mktemp("smg") / "smg.log"
    command = [SMG, "launch", "--worker-urls", *(server.url for server in servers), "--policy", "least_load"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and process.poll() is None:
        try:
            workers = httpx.get(f"{url}/workers", timeout=5).json()["workers"]
            if sum(worker["is_healthy"] for worker in workers) == 2:
                return
        except (httpx.HTTPError, ValueError, KeyError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"smg does not find two servers:\n{log.read_text()}")


def chat(url: str, text: str, **more: object) -> httpx.Response:
    body = {"model": "echo", "messages": [{"role": "user", "content": text}], "max_tokens": 16, **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def requests_of(server: ServerProcess) -> int:
    return server.log.read_text().count("POST '/v1/chat/completions'")


def test_it_answers_as_the_servers_do(gateway: str, servers: list[ServerProcess]):
    assert [model["id"] for model in httpx.get(f"{gateway}/v1/models", timeout=30).json()["data"]] == ["echo"]
    assert httpx.get(f"{gateway}/health", timeout=30).status_code == 200
    through, direct = chat(gateway, "hello"), chat(servers[0].url, "hello")
    assert through.status_code == 200, through.text
    assert through.json()["choices"][0]["message"] == direct.json()["choices"][0]["message"]


def test_it_streams(gateway: str):
    streamed = chat(gateway, "hello", stream=True).text
    assert streamed.count("data: {") > 1 and streamed.rstrip().endswith("data: [DONE]")


def test_the_least_loaded_server_is_asked(gateway: str, servers: list[ServerProcess]):
    before = [requests_of(server) for server in servers]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: chat(gateway, f"number {number}"), range(64)))
    assert {answer.status_code for answer in answers} == {200}
    assert all(requests_of(server) > count for server, count in zip(servers, before, strict=True))


def test_one_that_ends_is_left_out(gateway: str, servers: list[ServerProcess]):
    """The last test: one server is gone afterwards."""
    assert servers[1].stop() == 0
    answers = [chat(gateway, f"again {number}") for number in range(8)]
    assert {answer.status_code for answer in answers} == {200}
