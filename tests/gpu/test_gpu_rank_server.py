"""`kt serve demo --tp 2` on GPUs: it answers, as one rank does; whichever ends, both do, and come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gpu import needs_cuda
from quiet_clock import PATIENCE
from ranks.processes import processes_of_ranks
from server_harness import ServerProcess, running, spawn_real
from tandem.engine.start.loader import model_directory

pytestmark = [pytest.mark.gpu, needs_cuda]
FLAGS = ("--tp", "2", "--mem-fraction-static", "0.3", "--kt-gpu-experts-ratio", "0.5", "--max-total-tokens", "4096")
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
        log = tmp_path_factory.mktemp("ranks") / "log"
        with running(spawn_real(Path(model_directory("demo")), log, *FLAGS)) as started:
            yield started


def asked(server: ServerProcess, tokens: int = 12) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return httpx.post(
        f"{server.url}/generate", json={"text": PROMPT, "sampling_params": sampling}, timeout=PATIENCE
    )


def test_it_answers_alone_and_beside_others(server) -> None:
    server.wait_until_ready()
    alone = asked(server).json()["text"]
    assert "Paris" in alone
    with ThreadPoolExecutor(24) as several:
        answers = [several.submit(asked, server) for _ in range(64)]
        assert all("Paris" in each.result().json()["text"] for each in answers)
    text = server.log.read_text()
    assert "sums of 2 ranks go through" in text or "ranks                    2" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_other_and_both_come_back(server, rank) -> None:
    server.wait_until_ready()
    before = processes_of_ranks(server)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(asked, server, 3000)
        while not server.info()["stats"]["running"]:
            assert not answer.done(), answer.result().text
            time.sleep(0.01)
        os.kill(before[rank].pid, signal.SIGKILL)
        failed = answer.result()
    assert failed.status_code == 503 and f"rank {rank} ended: SIGKILL" in failed.text
    server.wait_until_ready()
    assert "Paris" in asked(server).json()["text"]
