"""docs/grafana.json against a real Prometheus (Debian: prometheus), which scrapes a server with a key."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_harness import ServerProcess, free_port, running, spawn_echo

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
KEY = "s3cret"
CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs:
  - job_name: tandem
    authorization: {{credentials: {key}}}
    static_configs: [{{targets: ["{target}"]}}]
"""
SECONDS = 60.0  # on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    found = spawn_echo(tmp_path_factory.mktemp("grafana") / "log", "load_routed", api_key=KEY)
    found.headers = {"Authorization": f"Bearer {KEY}"}
    with running(found):
        yield found


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    folder, address = tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{free_port()}"
    (folder / "config.yml").write_text(CONFIG.format(key=KEY, target=server.url.removeprefix("http://")))
    command = ["prometheus", f"--config.file={folder}/config.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def asked(prometheus: str, query: str) -> list[dict[str, Any]]:
    """The result's series."""
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=30).json()
    assert answer["status"] == "success", (query, answer)
    return list(answer["data"]["result"])


def is_told(prometheus: str, query: str) -> bool:
    """Every series of it is a number."""
    try:
        found = asked(prometheus, query)
    except httpx.TransportError:  # it is starting
        return False
    return bool(found) and all(math.isfinite(float(each["value"][1])) for each in found)


def test_every_panel_shows_numbers(server: ServerProcess, prometheus: str) -> None:
    left, ends = dict.fromkeys(["up", *QUERIES]), time.monotonic() + SECONDS
    assert len(left) > 25
    while left and time.monotonic() < ends:
        asked_for = {"text": "x" * 40, "sampling_params": {"max_new_tokens": 8}}
        httpx.post(
            f"{server.url}/generate", json=asked_for, headers=server.headers, timeout=30
        ).raise_for_status()
        for query in list(left):
            if is_told(prometheus, query.replace("$__rate_interval", "5s")):
                del left[query]
    assert not left, list(left)
    assert asked(prometheus, "up")[0]["value"][1] == "1"


def test_what_it_counts_is_what_the_server_made(server: ServerProcess, prometheus: str) -> None:
    ends = time.monotonic() + SECONDS
    while not is_told(prometheus, "tandem_generated_tokens_total") and time.monotonic() < ends:
        time.sleep(0.1)
    made = server.info()["stats"]["generated_tokens"]
    while time.monotonic() < ends:
        counted = float(asked(prometheus, "tandem_generated_tokens_total")[0]["value"][1])
        if counted == made:
            return
        time.sleep(0.2)
    raise AssertionError((counted, made))
