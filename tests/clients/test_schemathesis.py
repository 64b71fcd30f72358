"""schemathesis against a real server process: all of its checks, three seeds, three minutes each, no finding."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_harness import ServerProcess, running, spawn_echo

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SECONDS = 180
CHECKS = Path(__file__).with_name("openapi_checks.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running(spawn_echo(tmp_path_factory.mktemp("echo") / "server.log", "load_short")) as process:
        yield process


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_check_finds_anything(server: ServerProcess, tmp_path: Path, seed: int):
    seconds = int(os.environ.get("SCHEMATHESIS_SECONDS", SECONDS))
    command = [
        sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{server.url}/openapi.json", "--checks", "all",
        "--exclude-checks", "positive_data_acceptance", "--seed", str(seed), "--max-time", str(seconds),
        "--continue-on-failure", "--generation-database", "none",
        "--request-timeout", "60", "--max-response-time", "60",  # a server's first grammar starts a process
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"SCHEMATHESIS_HOOKS": str(CHECKS)}, capture_output=True,
        text=True, timeout=seconds + 300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"Tested: (\d\d)\n", done.stdout), done.stdout
    assert server.healthy() and server.info()["engine_restarts"] == 0
