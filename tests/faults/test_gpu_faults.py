"""What goes wrong on a GPU while a server serves, and what its clients see: lines of docs/faults.md.

    pytest -m gpu tests/faults/test_gpu_faults.py --write-faults DIR    # DIR/faults-gpu.json
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fault_servers import (
    ENGINE,
    LONG,
    answer,
    as_anybody,
    ask,
    child,
    error_of,
    fault_model,
    good_answer,
    idle,
    spawn_kt,
    wait_until,
)
from fault_table import Fault
from faulty_engine import command

from gpu import needs_cuda
from server_harness import ServerProcess, running
from tiny import TinyModels

pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(900)]
WATCHDOG, RESTART_SECONDS = 15.0, 120.0  # kernels wait for the CPU's experts for a third of it


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("gpu-faults")
    model = fault_model(TinyModels(folder / "tiny")["qwen3_moe-gpu"], folder / "model")
    flags = "--kt-gpu-experts-ratio", "0.5", "--watchdog-timeout", str(WATCHDOG), "--max-running-requests", "8"
    flags += ("--disable-dynamic-expert-update",)  # answers before and after a fault are compared
    with running(spawn_kt(model, folder / "log", *flags, faulty=True)) as found:
        yield found


@pytest.fixture
def server(shared: ServerProcess) -> ServerProcess:
    shared.wait_until_ready()
    return shared


@pytest.fixture(scope="module")
def expected(shared: ServerProcess) -> list[int]:
    """And it is a GPU that answers, with experts on both sides."""
    gpu = shared.info()["plan"]["gpu"]
    assert gpu is not None and gpu["sizes"]["experts"] > 0
    return answer(shared)


def ask_for(server: ServerProcess, word: str) -> httpx.Response:
    return ask(server, 8, ids=command(word), timeout=300)


@pytest.mark.fault("The GPU's memory runs out in a step")
def test_gpu_memory_runs_out(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """The requests of that step fail; the engine and its graphs go on."""
    engine = child(server, ENGINE)
    fault.strikes()
    refused = ask_for(server, "gpumem")
    fault.seen("the requests of that step get 503: “not enough GPU memory”; the next step works", 10)
    assert refused.status_code == 503 and "not enough GPU memory" in error_of(refused)["message"]
    assert answer(server) == expected
    fault.good(20)
    assert child(server, ENGINE) == engine
    wait_until(lambda: idle(server))


@pytest.mark.fault("The CPU never answers a hand-off of the GPU")
def test_a_hand_off_that_is_stuck(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """The kernels lose patience before the watchdog does, and the step fails."""
    fault.strikes()
    refused = ask_for(server, "nocpu!")
    fault.seen("the requests of that step get 503 once the GPU's patience ends; the next step works", WATCHDOG)
    assert refused.status_code == 503 and "given up" in error_of(refused)["message"]
    assert answer(server) == expected
    fault.good(WATCHDOG + 5)
    wait_until(lambda: idle(server))


@pytest.mark.fault("A CUDA error (a device assert): nothing on the GPU works any more")
def test_a_cuda_error(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    engine = child(server, ENGINE)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, server, LONG, stream=True)  # longer than any compiler takes
        wait_until(lambda: server.info()["stats"]["running"] == 1)
        fault.strikes()
        refused = ask_for(server, "assert")
        error_of(other.result())
        fault.seen("503, in a stream an error event; `/health` is 503 until a new engine is ready", 20)
    assert refused.status_code == 503
    assert good_answer(server) == expected
    fault.good(20 + RESTART_SECONDS)
    assert child(server, ENGINE) != engine
    assert "EngineError: the GPU stopped working" in server.log.read_text()


@pytest.mark.fault("A kernel that never ends (`--watchdog-timeout 15`)")
def test_a_kernel_that_never_ends(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    fault.strikes()
    refused = ask_for(server, "kernel")
    fault.seen("503: “it was stuck for …, --watchdog-timeout is 15”; a new engine", WATCHDOG + 15)
    assert refused.status_code == 503 and "--watchdog-timeout" in error_of(refused)["message"]
    assert good_answer(server) == expected
    fault.good(WATCHDOG + RESTART_SECONDS)


@pytest.mark.fault("The engine's process is killed while the GPU computes (`kill -9`)")
def test_the_engine_is_killed(server: ServerProcess, expected: list[int], fault: Fault) -> None:
    """The GPU's memory is free again, or the new engine would not fit."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, server, 2000, stream=True)
        wait_until(lambda: server.info()["stats"]["running"] == 1)
        fault.strikes()
        child(server, ENGINE).kill()
        assert "SIGKILL" in error_of(other.result())["message"]
        fault.seen("an error event: “the engine process ended (SIGKILL …)”; `/health` is 503", 5)
    assert good_answer(server) == expected
    fault.good(RESTART_SECONDS)


@pytest.mark.fault("HOME is read-only, with a GPU")
def test_a_read_only_home(tmp_path: Path, fault: Fault) -> None:
    """Triton keeps what it has compiled below HOME."""
    home = tmp_path / "home"
    home.mkdir(0o555)
    model = fault_model(TinyModels(tmp_path / "tiny")["qwen3_moe-gpu"], tmp_path / "model")
    fault.strikes()
    server = spawn_kt(
        model, tmp_path / "log", "--max-running-requests", "2", before=as_anybody, HOME=str(home),
        TRITON_CACHE_DIR="",
    )  # fmt: skip
    with running(server):
        assert answer(server)
        fault.seen("nothing: kernels are compiled for this start alone")
        fault.good(RESTART_SECONDS)
    assert not list(home.iterdir())
