"""A Ray cluster of this machine alone, whose engines are stub processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from quiet_clock import PATIENCE
from ray_stubs import STUB, stub
from server_harness import RESERVED, free_port


class Cluster:
    """Serves on `url`. `folder`: of the stubs' notes."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def run(self, *models: Any, **more: Any) -> None:
        """Until all replicas are there."""
        import tandem.ray
        from ray import serve

        serve.run(tandem.ray.app(models=models, cpus=0, command=partial(stub, str(self.folder)), **more))

    def chat(self, model: str | None, text: str = "hi", **more: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=body_of(model, text) | more)

    @contextlib.contextmanager
    def stream(self, model: str, text: str) -> Iterator[Iterator[Any]]:
        """Its events as they come, JSON or the bare text."""
        body = body_of(model, text) | {"stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield (event_of(line) for line in response.iter_lines() if line.startswith("data: "))

    def pids(self, model: str) -> list[int]:
        """Process ids of the stubs that serve a model."""
        return [process.pid for process in psutil.process_iter(["cmdline"]) if self._serves(process, model)]

    def held(self, model: str) -> list[int]:
        """Stubs that were asked to hold, in that order."""
        with contextlib.suppress(FileNotFoundError):
            return list(map(int, (self.folder / f"{model}.held").read_text().split()))
        return []

    def _serves(self, process: psutil.Process, model: str) -> bool:
        command = process.info["cmdline"] or []
        return str(STUB) in command and command[-2:] == [model, str(self.folder)]


def body_of(model: str | None, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} | ({"model": model} if model else {})


def event_of(line: str) -> Any:
    data = line.removeprefix("data: ")
    return json.loads(data) if data.startswith("{") else data


def kill_replica(stub_pid: int) -> float:
    """The replica's process, not its server. Returns when."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(psutil.Process(stub_pid).ppid(), signal.SIGKILL)
    return time.monotonic()


def wait_until(done: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.05)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    import ray
    from ray import serve

    port = free_port()
    RESERVED.pop().close()  # Ray binds no address that is bound
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    fakes = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([fakes, os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=2, resources={"tandem_gpu": 2}, include_dashboard=False, logging_level="ERROR",
        object_store_memory=80 << 20, namespace="tests",
    )  # fmt: skip
    serve.start(http_options={"port": port, "host": "127.0.0.1"})
    try:
        yield Cluster(folder, port)
    finally:
        serve.shutdown()
        ray.shutdown()
