"""A server that chooses by itself to use several GPUs: it starts their processes, keeps the choice, and takes one GPU
where they do not start. CPU ranks stand in for those on GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fault_servers import wait_until

from plans import GIB
from quiet_clock import PATIENCE
from ranks.choosing import CHOOSES, NO_LANE, NO_RANK, runs_first, with_nvidia_smi
from ranks.processes import processes_of_ranks
from server_harness import ServerProcess, command_line, plain, running, spawn_real
from tandem import LLM, SamplingParams
from tandem.engine.start import loader
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.machine.machine import Machine

pytestmark = pytest.mark.skipif(len(Machine.detect_cpus().cores) < 2, reason="a rank needs a core")

FLAGS = ("--dtype", "float32", "--skip-server-warmup")
PROMPT = [7, 8, 9, 10, 11]
Serve = Callable[..., "contextmanager[ServerProcess]"]


@pytest.fixture
def serve(tiny_models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A server on a machine whose nvidia-smi is there and shows nothing. code: runs in its processes first."""
    with_nvidia_smi(tmp_path, monkeypatch)

    @contextmanager
    def served(code: str) -> Iterator[ServerProcess]:
        runs_first(code, tmp_path, monkeypatch)
        with running(spawn_real(tiny_models["glm4_moe"], tmp_path / "log", *FLAGS)) as server:
            server.wait_until_ready()
            yield server

    return served


@pytest.fixture(scope="module")
def expected(tiny_models) -> list[int]:
    llm = LLM(str(tiny_models["glm4_moe"]), device="cpu", dtype="float32", kt_cpuinfer=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    return llm.generate([PROMPT], greedy, progress=False)[0].token_ids


def answered(server: ServerProcess) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    return plain.post(f"{server.url}/generate", json=body).json()["output_ids"]


def test_ranks_that_were_chosen_answer_as_one_and_come_back(serve: Serve, expected: list[int]) -> None:
    with serve(CHOOSES) as server:
        assert answered(server) == expected
        assert server.info()["tensor_parallel_size"] == server.info()["plan"]["ranks"] == 2
        before = processes_of_ranks(server)
        said = server.log.read_text()
        assert "parallelism              --tp 2            a stand-in's choice" in said
        assert said.index("parallelism") < said.index("ranks                    2")
        os.kill(before[1].pid, signal.SIGKILL)
        psutil.wait_procs(before, PATIENCE)
        wait_until(lambda: server.info()["engine_restarts"] == 1)  # it may not have heard of their end yet
        server.wait_until_ready()
        assert answered(server) == expected
        assert not {each.pid for each in processes_of_ranks(server)} & {each.pid for each in before}
        assert server.log.read_text().count("a stand-in's choice") == 1  # later starts keep it as if a flag said so


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (NO_RANK, "the engine process ended at start (rank 1 ended: exit code 1"),
        (NO_LANE, "no way between GPUs works: peer: wrong sums; host: OSError"),
    ],
    ids=["rank", "lane"],
)
def test_ranks_that_were_chosen_and_do_not_start_are_left(serve: Serve, expected: list[int], breaks, why) -> None:
    with serve(CHOOSES + breaks) as server:
        assert answered(server) == expected
        said = server.log.read_text()
        assert f"--tp 2 was chosen and did not start: {why}" in said and "; starting without it" in said
        assert "parallelism              one GPU" in said and "Traceback" not in said.partition("one GPU")[2]
        children = psutil.Process(server.process.pid).children()
        assert not [each for each in children if "ranks.process" in command_line(each)]


def machine_with(*gpus: Gpu) -> Machine:
    return replace(Machine.detect_cpus(), gpus=gpus, gpu_missing=())


@pytest.mark.parametrize("flags", [{}, {"tp": 1}, {"device": "cpu"}])
def test_files_are_read_once_and_only_where_there_is_a_choice(tiny_models, monkeypatch, flags) -> None:
    """The same files are then loaded. A tiny model fits one GPU."""
    gpus = [Gpu("NVIDIA H200", 141 * GIB, 140 * GIB, "gen5 x16", number, "", (9, 0)) for number in range(2)]
    monkeypatch.setattr(loader, "may_have_gpus", lambda: True)
    monkeypatch.setattr(Machine, "with_gpus", lambda machine: machine)
    config = EngineConfig.from_keywords(str(tiny_models["glm4_moe"]), **flags)
    monkeypatch.setattr(loader, "these_cpus", lambda: machine_with(*gpus))
    way = loader.chosen_way(config)
    if flags:
        assert way == loader.ChosenWay(loader.WayChoice(config))
        return
    assert way.choice.decision is not None and way.choice.decision.value == "one GPU"
    assert way.choice.config == config and way.stored is not None
    assert way.machine is not None and way.machine.gpus == tuple(gpus)
    monkeypatch.setattr(loader, "these_cpus", lambda: machine_with(gpus[0]))
    assert loader.chosen_way(config) == loader.ChosenWay(loader.WayChoice(config))


def test_a_load_takes_the_files_of_the_choice(tiny_models, monkeypatch) -> None:
    config = EngineConfig.from_keywords(str(tiny_models["glm4_moe"]), dtype="float32")
    stored = loader.StoredModelFiles.at(config, tiny_models["glm4_moe"])
    decision = loader.resolve(config, stored.model, machine_with(), stored.formats).decisions[0]
    way = loader.ChosenWay(loader.WayChoice(config, decision, ("one notice",)), stored, machine_with())
    monkeypatch.setattr(loader.StoredModelFiles, "at", None)  # not read again
    plan = loader.load_parts(config, way=way).plan
    assert plan.decisions[0] == decision and plan.notices[0] == "one notice"
