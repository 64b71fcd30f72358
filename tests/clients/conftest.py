"""The demo model in float32, served as users serve it, for clients that are installed: `pip install '.[clients]'`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server_harness import ServerProcess, running, spawn_real


@pytest.fixture(scope="package")
def demo_server(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("demo") / "server.log"
    with running(spawn_real(demo_dir, log, "--dtype", "float32", "--max-total-tokens", "8192")) as process:
        yield process
