"""`kt serve --tp 2` on GPUs: its tokens are as probable as one rank's; whichever ends, both do, and come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from draft_models import drafted
from gpu import needs_cuda
from gpu_sessions import logprobs, rms
from quiet_clock import PATIENCE
from ranks.choosing import CHOOSES, NO_LANE, runs_first
from ranks.processes import processes_of_ranks
from server_harness import ServerProcess, running, spawn_real

pytestmark = [pytest.mark.gpu, needs_cuda]
FLAGS = ("--tp", "2", "--mem-fraction-static", "0.3", "--kt-gpu-experts-ratio", "0.5", "--max-total-tokens", "8192",
         "--chunked-prefill-size", "64")
PROMPT = [7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def server(tiny_models, tmp_path_factory) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
        log = tmp_path_factory.mktemp("ranks") / "log"
        with running(spawn_real(tiny_models["qwen3_moe-gpu"], log, *FLAGS)) as started:
            yield started


def asked(server: ServerProcess, tokens: int = 12) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    return httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE)


def test_it_answers_alone_and_beside_others(server, tiny_models) -> None:
    server.wait_until_ready()
    with ThreadPoolExecutor(24) as several:
        answers = [each.result().json() for each in [several.submit(asked, server) for _ in range(64)]]
    answers.append(asked(server).json())
    got = torch.tensor([[each[0] for each in one["meta_info"]["output_token_logprobs"]] for one in answers])
    texts = [PROMPT + one["output_ids"] for one in answers]
    exact, theirs = (logprobs(tiny_models["qwen3_moe-gpu"], dtype, texts, 12) for dtype in ("float32", "bfloat16"))
    assert rms(got, exact) < 2 * rms(theirs, exact)
    assert "ranks                    2" in server.log.read_text() and "Traceback" not in server.log.read_text()


def test_a_prompt_of_several_chunks_is_answered(server) -> None:
    """A chunk that is not the last has no logits."""
    server.wait_until_ready()
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [5 + i % 90 for i in range(100)], "sampling_params": sampling}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE)
    assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 4


def test_prompts_take_turns_with_a_reader(server, tiny_models) -> None:
    """In pieces between its steps, in the same order on both ranks: else sums would be of different rows."""
    server.wait_until_ready()
    prompts = [[(5 + 3 * at + i) % 90 for at in range(100)] for i in range(4)]
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    with ThreadPoolExecutor(8) as several:
        reader = several.submit(asked, server, 100)
        bodies = [{"input_ids": each, "sampling_params": sampling, "return_logprob": True} for each in prompts]
        posts = [several.submit(httpx.post, f"{server.url}/generate", json=b, timeout=PATIENCE) for b in bodies]
        answers, read = [each.result().json() for each in posts], reader.result().json()
    assert len(read["output_ids"]) == 100
    got = torch.tensor([[each[0] for each in one["meta_info"]["output_token_logprobs"]] for one in answers])
    texts = [prompt + one["output_ids"] for prompt, one in zip(prompts, answers, strict=True)]
    exact, theirs = (logprobs(tiny_models["qwen3_moe-gpu"], dtype, texts, 8) for dtype in ("float32", "bfloat16"))
    assert rms(got, exact) < 2 * rms(theirs, exact)


def test_a_draft_layer_drafts_on_all_ranks(tiny_models, tmp_path, monkeypatch) -> None:
    """Drafts of random weights: few come, and answers are as probable as without."""
    monkeypatch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
    path = drafted(tiny_models["glm4_moe"], tmp_path / "drafted").path
    flags = (*FLAGS, "--speculative-algorithm", "NEXTN", "--disable-speculative-governor")
    with running(spawn_real(path, tmp_path / "log", *flags)) as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(8) as several:
            answers = [each.result().json() for each in [several.submit(asked, server) for _ in range(8)]]
        said = server.info()["stats"]["speculation"]
    got = torch.tensor([[each[0] for each in one["meta_info"]["output_token_logprobs"]] for one in answers])
    texts = [PROMPT + one["output_ids"] for one in answers]
    exact, theirs = (logprobs(path, dtype, texts, 12) for dtype in ("float32", "bfloat16"))
    assert rms(got, exact) < 2 * rms(theirs, exact)
    assert said["guesses"] > 0 and "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_other_and_both_come_back(server, rank) -> None:
    server.wait_until_ready()
    before = processes_of_ranks(server)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(asked, server, 110)
        while not server.info()["stats"]["running"]:
            assert not answer.done(), answer.result().text
            time.sleep(0.01)
        os.kill(before[rank].pid, signal.SIGKILL)
        failed = answer.result()
    assert failed.status_code == 503 and f"rank {rank} ended: SIGKILL" in failed.text
    server.wait_until_ready()
    assert len(asked(server).json()["output_ids"]) == 12


def test_ranks_that_were_chosen_without_a_flag(tiny_models, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
    runs_first(CHOOSES, tmp_path, monkeypatch)
    with running(spawn_real(tiny_models["qwen3_moe-gpu"], tmp_path / "log", *FLAGS[2:])) as server:
        server.wait_until_ready()
        assert len(asked(server).json()["output_ids"]) == 12 and len(processes_of_ranks(server)) == 2
        assert "parallelism              --tp 2" in server.log.read_text()


def test_one_gpu_serves_where_chosen_ranks_find_no_lane(tiny_models, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
    runs_first(CHOOSES + NO_LANE, tmp_path, monkeypatch)
    with running(spawn_real(tiny_models["qwen3_moe-gpu"], tmp_path / "log", *FLAGS[2:])) as server:
        server.wait_until_ready()
        assert len(asked(server).json()["output_ids"]) == 12
        said = server.log.read_text()
        assert "--tp 2 was chosen and did not start: no way between GPUs works" in said
        assert "parallelism              one GPU" in said
