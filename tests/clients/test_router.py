"""sglang-router in front of the server: it serves with the id that it lists."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server_harness import ServerProcess, free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

if importlib.util.find_spec("sglang_router") is None:
    pytest.skip("sglang-router is not installed", allow_module_level=True)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def router(demo_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it has found the server."""
    port, log = free_port(), tmp_path_factory.mktemp("router") / "router.log"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", demo_server.url]
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
            if httpx.get(f"{url}/v1/models", timeout=5).json().get("data"):
                return
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"the router does not list a model:\n{log.read_text()}")


def test_it_serves_with_the_id_that_it_lists(router: str, demo_server: ServerProcess):
    listed = [model["id"] for model in httpx.get(f"{router}/v1/models", timeout=30).json()["data"]]
    assert listed == [demo_server.info()["served_model_name"]]
    body = {"model": listed[0], "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    answer = httpx.post(f"{router}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    direct = httpx.post(f"{demo_server.url}/v1/chat/completions", json=body, timeout=300).json()
    assert answer.json()["choices"][0]["message"] == direct["choices"][0]["message"]


def test_it_streams_and_generates(router: str):
    body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    whole = httpx.post(f"{router}/generate", json=body, timeout=300)
    assert whole.status_code == 200 and "Paris" in whole.json()["text"]
    chat = {"model": "any", "messages": QUESTION, "temperature": 0, "max_tokens": 24, "stream": True}
    streamed = httpx.post(f"{router}/v1/chat/completions", json=chat, timeout=300).text
    assert "Paris" in streamed and streamed.rstrip().endswith("data: [DONE]")
