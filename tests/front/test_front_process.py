"""`kt serve --models` as users run it, with two tiny real models, and what says whether one fits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from quiet_clock import PATIENCE
from server_harness import ServerProcess, command_line, free_port, has_ended, plain, running, spawn
from tandem.errors import ConfigError, DoesNotFit
from tandem.kernels.this_machine import these_cpus
from tandem.machine.gpus import Gpu
from tandem.server import launch
from tandem.server.front import fits

FILE = """
max_loaded = {most}
stay_seconds = 0
[models.first]
model = "{first}"
max-total-tokens = 512
[models.second]
model = "{second}"
max-total-tokens = 512
"""


def ask(server: ServerProcess, model: str, **more: object) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0} | more
    return plain.post(server.url + "/v1/completions", json=body)


def wait_until(condition, seconds: float = PATIENCE) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.05)


def test_two_real_models_take_turns(tiny_models, tmp_path: Path):
    """Loading, changing places, a file that changes, a wrong file, and the death of the front."""
    file, port = tmp_path / "models.toml", free_port()
    paths = {"first": tiny_models["qwen3_moe"], "second": tiny_models["glm4_moe"]}
    file.write_text(FILE.format(most=1, **paths))
    words = ["-m", "tandem", "serve", "--models", str(file), "--port", str(port), "--kt-cpuinfer", "1"]
    server = ServerProcess(spawn(words, tmp_path / "log"), port, tmp_path / "log")
    with running(server):
        first, second = ask(server, "first").json(), ask(server, "second").json()
        assert (first["model"], second["model"]) == ("first", "second") and first["choices"][0]["text"]
        held = [each["id"] for each in server.get("/v1/models").json()["data"] if each["status"]["value"] == "loaded"]
        assert held == ["second"]
        file.write_text("[models.first]\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the models stay as they are: [models.first] has no model" in server.log.read_text())
        file.write_text(FILE.format(most=2, **paths).replace("models.first", "models.third"))
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: ask(server, "first", max_tokens=1).status_code == 404)
        assert ask(server, "third", stream=True).text.endswith("data: [DONE]\n\n")
        assert len(server.get("/api/ps").json()["models"]) == 1  # max_loaded is as it was
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert any("engine_process" in command_line(child) for child in family)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        gone, alive = psutil.wait_procs(family, PATIENCE)
        assert gone and all(map(has_ended, alive))


def test_sigterm_ends_the_front_and_its_models(tiny_models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The key that it has from the environment is not its models' key."""
    monkeypatch.setenv("TANDEM_API_KEY", "s3cret")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "only").symlink_to(tiny_models["qwen3_moe"])
    path = tmp_path / "front.sock"
    words = ["-m", "tandem", "serve", "--models", str(tmp_path / "models"), "--uds", str(path)]
    process = spawn([*words, "--max-total-tokens", "512", "--kt-cpuinfer", "1"], tmp_path / "log")
    there = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=there, base_url="http://tandem", timeout=PATIENCE) as client:

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return client.get("/health").status_code == 200
            return False

        wait_until(answers)
        assert path.stat().st_mode & 0o777 == 0o600
        assert client.get("/v1/models").status_code == 401
        key = {"authorization": "Bearer s3cret"}
        said = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=key)
        assert said.json()["model"] == "only", said.text
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert family and all(map(has_ended, family))
    assert not path.exists()


# --- what fits


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch):
    """Plans of a model that needs `ram` bytes, and takes a GPU that has `vram` free."""

    def install(ram: int, vram: int = 0, gpus: tuple[Gpu, ...] = ()):
        machine = dataclasses.replace(these_cpus(), total_memory=100, available_memory=40, gpus=gpus)
        monkeypatch.setattr(fits, "this_machine", lambda: machine)
        monkeypatch.setattr(fits, "family_of", set)
        monkeypatch.setattr(fits, "own_bytes", lambda pid: 30)

        class Planned:
            def __init__(self, on) -> None:
                self.plan = self
                self.gpu = next((gpu for gpu in on.gpus if vram and gpu.free_bytes >= vram), None)

        def planned(config, on):
            if on.available_memory < ram:
                raise DoesNotFit(f"{ram} of {on.available_memory}")
            return Planned(on)

        monkeypatch.setattr(fits, "planned", planned)
        return lambda *loaded: fits.verdict(["--model", "/"], loaded)

    return install


def test_memory_of_others_counts_where_theirs_can_go(plans):
    assert plans(40)() == plans(40)(1) == ("", True)
    assert plans(60)() == ("60 of 40", False)
    assert plans(60)(1) == ("60 of 40", True)
    assert plans(90)(1) == ("90 of 70", False) and plans(90)(1, 2) == ("90 of 40", True)


def test_a_gpu_that_others_hold_is_waited_for(plans, monkeypatch: pytest.MonkeyPatch):
    gpu = Gpu("card", 24, 4, "gen5 x16", uuid="GPU-1")
    monkeypatch.setattr(fits, "gpu_bytes", lambda pids: {"GPU-1": 10} if pids else {})
    assert plans(10, 4, (gpu,))(1) == ("", True)
    assert plans(10, 12, (gpu,))(1) == ("the GPU is taken by other models", True)
    assert plans(10, 12, (gpu,))() == ("", True)  # nobody of ours holds it: without it, then
    assert plans(10, 22, (gpu,))(1) == ("", True)  # it would do without it anyway
    monkeypatch.setattr(fits, "gpu_bytes", lambda pids: {})
    assert plans(10, 22, (gpu,))(1) == ("the GPU is taken by other models", True)  # nobody knows who holds it


def test_processes_and_what_they_hold():
    own = os.getpid()
    assert own in fits.family_of([own]) and os.getppid() not in fits.family_of([own])
    assert fits.own_bytes(own) > 1 << 20 and fits.own_bytes(2**22 + 1) == 0


def test_a_socket_that_is_taken_and_one_that_was_left(tmp_path: Path):
    path = tmp_path / "s"
    with launch.listen_unix(path), pytest.raises(ConfigError, match="--uds"):
        launch.listen_unix(path)
    launch.listen_unix(path).close()  # as after a kill
    launch.listen_unix(path).close()
    with pytest.raises(ConfigError, match="path"):
        launch.listen_unix(tmp_path / ("x" * 120))
