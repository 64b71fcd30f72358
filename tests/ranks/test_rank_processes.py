"""`kt serve --tp 2 --device cpu`: two processes answer as one; whichever ends, both do, and come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import psutil
import pytest

from quiet_clock import PATIENCE
from ranks.processes import processes_of_ranks
from server_harness import ServerProcess, plain, running, spawn_real
from tandem import LLM, SamplingParams
from tandem.machine.machine import Machine
from tandem.server.ranks.processes import RankProcesses

pytestmark = pytest.mark.skipif(len(Machine.detect_cpus().cores) < 2, reason="a rank needs a core")

FLAGS = ("--tp", "2", "--device", "cpu", "--dtype", "float32", "--skip-server-warmup")
PROMPT = [7, 8, 9, 10, 11]
FIRST = """
import sys
if "tandem.server.ranks.process" in sys.orig_argv:
    import torch
    def refuse(*given):
        raise RuntimeError("no memory for a shard")
    torch.set_num_threads = refuse  # the first thing that a rank does
"""
LAST = """
import sys, time
if "tandem.server.ranks.process" in sys.orig_argv:
    from tandem.engine import runners
    def refuse(*given):
        time.sleep(8)
        raise RuntimeError("no memory for a shard")
    runners.allocate = refuse  # the last one
"""
IMPATIENT = """
import sys
if {"tandem.server.ranks.process", "tandem.server.engine_process"} & {*sys.orig_argv}:
    from tandem.kernels.ranks.shm import ShmGroup
    ShmGroup.__init__.__defaults__ = ("", 2.0)  # no path, and seconds
"""


@pytest.fixture(scope="module")
def server(tiny_models, tmp_path_factory) -> Iterator[ServerProcess]:
    with running(spawn_real(tiny_models["glm4_moe"], tmp_path_factory.mktemp("ranks") / "log", *FLAGS)) as started:
        yield started


@pytest.fixture(scope="module")
def expected(tiny_models) -> list[int]:
    llm = LLM(str(tiny_models["glm4_moe"]), device="cpu", dtype="float32", kt_cpuinfer=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    return llm.generate([PROMPT], greedy, progress=False)[0].token_ids


def asked(server: ServerProcess, tokens: int = 20) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    return plain.post(f"{server.url}/generate", json=body)


def asked_until_refused(server: ServerProcess) -> httpx.Response:
    """Answers as long as a tiny model's context takes a moment only, less than another process may be held up."""
    while (answer := asked(server, 110)).status_code == 200:
        pass
    return answer


def all_ended(processes: list[psutil.Process]) -> None:
    assert not psutil.wait_procs(processes, PATIENCE)[1]


def test_two_ranks_answer_as_one(server, expected) -> None:
    server.wait_until_ready()
    assert asked(server).json()["output_ids"] == expected
    with ThreadPoolExecutor(6) as several:
        assert all(answer.result().json()["output_ids"] == expected for answer in
                   [several.submit(asked, server) for _ in range(6)])  # fmt: skip
    assert "ranks                    2" in server.log.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_other_and_both_come_back(server, expected, rank) -> None:
    server.wait_until_ready()
    before = processes_of_ranks(server)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(asked_until_refused, server)
        while not server.info()["stats"]["running"]:
            assert not answer.done()
            time.sleep(0.01)
        os.kill(before[rank].pid, signal.SIGKILL)
        failed = answer.result()
    assert failed.status_code == 503
    assert f"rank {rank} ended: SIGKILL" in failed.text
    all_ended(before)
    server.wait_until_ready()
    assert asked(server).json()["output_ids"] == expected
    assert f"the engine process ended (rank {rank} ended: SIGKILL" in server.log.read_text()
    assert not {each.pid for each in processes_of_ranks(server)} & {each.pid for each in before}
    assert "Traceback" not in server.log.read_text()


@pytest.mark.full
def test_a_rank_that_stands_still_is_noticed(tiny_models, tmp_path) -> None:
    flags = (*FLAGS, "--watchdog-timeout", "5")
    with running(spawn_real(tiny_models["glm4_moe"], tmp_path / "log", *flags)) as server:
        before = processes_of_ranks(server)
        before[1].suspend()
        assert asked(server).status_code == 503
        all_ended(before)
        assert "--watchdog-timeout is 5" in server.log.read_text()


@pytest.mark.full
def test_a_rank_that_does_not_answer_is_named(tiny_models, tmp_path, monkeypatch, expected) -> None:
    """By the one that waits, whose patience is shorter than the watchdog's. All end, and come back."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
    with running(spawn_real(tiny_models["glm4_moe"], tmp_path / "log", *FLAGS)) as server:
        before = processes_of_ranks(server)
        before[1].suspend()
        failed = asked(server)
        assert failed.status_code == 503 and "rank 1 has not answered for 2." in failed.text
        all_ended(before)
        server.wait_until_ready()
        assert asked(server).json()["output_ids"] == expected
        assert "the engine process ended (rank 1 has not answered for 2." in server.log.read_text()


class Ended(NamedTuple):
    returncode: int | None


@pytest.mark.parametrize(
    ("codes", "first", "missing", "says"),
    [
        ({1: None}, 1, "", "rank 0 ended: exit code 1"), ({1: -9}, 1, "", "rank 1 ended: SIGKILL"),
        ({1: None}, -9, "rank 1 has not answered", "rank 1 has not answered"),
        ({1: 1, 2: None}, -9, "rank 2 has not answered", "rank 2 has not answered"),
        ({1: None, 2: -11}, -9, "rank 2 has ended", "rank 2 ended: SIGSEGV"), ({}, 1, "", ""),
    ],
)  # fmt: skip
def test_whose_end_it_was(codes, first, missing, says) -> None:
    """A signal tells more than who missed whom; and that more than an exit code of one that gave up."""
    ranks = RankProcesses("")
    ranks._processes = {rank: Ended(code) for rank, code in codes.items()}
    assert ranks.why_ended(first, missing).startswith(says) and bool(says) == bool(ranks.why_ended(first, missing))


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL])
def test_no_rank_outlives_the_server(tiny_models, tmp_path, how) -> None:
    with running(spawn_real(tiny_models["glm4_moe"], tmp_path / "log", *FLAGS)) as server:
        processes = processes_of_ranks(server)
        server.process.send_signal(how)
        server.process.wait(PATIENCE)
        all_ended(processes)
        assert server.process.returncode == (0 if how == signal.SIGTERM else -9)


def test_what_cannot_be_divided_is_refused_before_anything_is_loaded(tiny_models, tmp_path) -> None:
    server = spawn_real(tiny_models["deepseek_v3"], tmp_path / "log", *FLAGS)
    assert server.process.wait(PATIENCE) == 2
    assert "--tensor-parallel-size 2: 5 heads cannot be divided among 2 ranks; possible: 1" in server.log.read_text()


@pytest.mark.parametrize("breaks", [FIRST, pytest.param(LAST, marks=pytest.mark.full)], ids=["first", "last"])
def test_a_rank_that_cannot_start_is_named(tiny_models, tmp_path, monkeypatch, breaks) -> None:
    """It says why itself; the server says which it was, and ends, though the first rank has long been loaded."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "sitecustomize.py").write_text(breaks)
    server = spawn_real(tiny_models["glm4_moe"], tmp_path / "log", *FLAGS)
    assert server.process.wait(PATIENCE) == 1
    said = server.log.read_text()
    assert "rank 1: RuntimeError: no memory for a shard" in said and "rank 1 ended: exit code 1" in said
    assert "the engine process ended at start" in said and "is ready at" not in said
