"""What stands in the way of a start, and what does not: disks that are full or read-only, one core, a second server."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_servers import ENGINE, answer, as_anybody, child, fault_model, good_answer, spawn_kt, wait_until
from fault_table import Fault

from server_harness import ServerProcess, plain, running

pytestmark = pytest.mark.timeout(600)
START_SECONDS = 120.0  # on a machine that does other things as well
MOST_BYTES = 20_000  # of a file, where the disk is full


@pytest.fixture(scope="module")
def model(tiny_models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_model(tiny_models["qwen3_moe"], tmp_path_factory.mktemp("start") / "model")


def where_nothing_can_be_written() -> None:
    as_anybody()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("home")
    path.chmod(0o555)
    yield path
    path.chmod(0o755)


@pytest.fixture(scope="module")
def hindered(model: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """HOME is read-only, its log a full disk, and its packed cache on another."""
    folder = tmp_path_factory.mktemp("hindered")
    (folder / "packed").mkdir()
    full = os.open("/dev/full", os.O_WRONLY)
    server = spawn_kt(
        model, folder / "log", "--packed-cache", str(folder / "packed"),
        output=full, before=where_nothing_can_be_written, HOME=str(home), XDG_CACHE_HOME="",
    )  # fmt: skip
    os.close(full)
    with running(server):
        yield server


@pytest.mark.fault("The disk is full: the log (`/dev/full`)")
def test_a_log_that_nobody_can_write(hindered: ServerProcess, fault: Fault) -> None:
    fault.strikes()
    assert answer(hindered)
    fault.seen("nothing: the lines are lost")
    fault.good(10)
    assert Path(f"/proc/{hindered.process.pid}/fd/1").readlink() == Path("/dev/full")


@pytest.mark.fault("The disk is full: the packed cache (`RLIMIT_FSIZE`)")
def test_a_packed_cache_on_a_full_disk(hindered: ServerProcess, fault: Fault) -> None:
    fault.strikes()
    assert answer(hindered)
    fault.seen("nothing: the model is packed in memory; the log has a note, and no half of a file is left")
    fault.good(10)
    assert not list((hindered.log.parent / "packed").iterdir())


@pytest.mark.fault("HOME is read-only")
def test_a_read_only_home(hindered: ServerProcess, home: Path, fault: Fault) -> None:
    fault.strikes()
    assert answer(hindered)
    fault.seen("nothing: a model in a directory needs no HOME")
    fault.good(10)
    assert not list(home.iterdir())


@pytest.mark.fault("HOME is read-only, and the demo model is not built yet")
def test_no_place_for_the_demo(home: Path, tmp_path: Path, fault: Fault) -> None:
    fault.strikes()
    server = spawn_kt(
        "demo", tmp_path / "log", before=as_anybody, HOME=str(home), XDG_CACHE_HOME="", TANDEM_CACHE_DIR=""
    )
    assert server.process.wait(START_SECONDS) == 1
    fault.seen("it ends: “the demo model cannot be written to … (TANDEM_CACHE_DIR … names another place)”", 60)
    said = server.log.read_text()
    assert "TANDEM_CACHE_DIR" in said and "Traceback" not in said


@pytest.mark.full
@pytest.mark.fault("Two servers on one machine, on the same cores")
def test_two_servers(model: Path, tmp_path: Path, fault: Fault) -> None:
    with running(spawn_kt(model, tmp_path / "1")) as first, running(spawn_kt(model, tmp_path / "2")) as second:
        fault.strikes()
        assert [answer(first, 50), answer(second, 50)][0] == answer(second, 50)
        fault.seen("nothing: both answer the same")
        fault.good(60)
        child(first, ENGINE).kill()
        assert answer(second) == good_answer(first)


@pytest.mark.full
@pytest.mark.fault("One core (`taskset -c 0`)")
def test_one_core(model: Path, tmp_path: Path, fault: Fault) -> None:
    """Where workers that spin would keep the server's process from running at all."""
    core = min(os.sched_getaffinity(0))
    flags = "--kt-cpuinfer", "1"
    server = spawn_kt(model, tmp_path / "log", *flags, before=lambda: os.sched_setaffinity(0, {core}))
    with running(server):
        fault.strikes()
        assert answer(server, 50)
        fault.seen("nothing")
        fault.good(30)
        assert os.sched_getaffinity(server.process.pid) == {core}


@pytest.mark.full
@pytest.mark.fault("The engine cannot be started again: the model's files are gone")
def test_a_crash_loop_ends(model: Path, tmp_path: Path, fault: Fault) -> None:
    """It waits longer each time, says why, and gives up: something else may start the server elsewhere."""
    copy = shutil.copytree(model, tmp_path / "model")
    with running(spawn_kt(copy, tmp_path / "log")) as server:
        answer(server)
        (copy / "model.safetensors").unlink()
        fault.strikes()
        child(server, ENGINE).kill()
        wait_until(lambda: not server.healthy(), 10)
        refused = plain.post(server.url + "/generate", json={"text": "x"}, timeout=30)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.process.wait(300) == 1
        said = server.log.read_text()
        fault.seen("503; after 5 starts, of which each waits longer, the server ends with code 1 and says why", 300)
    assert "next start in 1 s" in said and "next start in 4 s" in said
    assert said.count("the engine could not be started again") == 4
    assert said.splitlines()[-1].startswith("error: ") and "model" in said.splitlines()[-1]
    assert "Traceback" not in said
    socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))).close()
