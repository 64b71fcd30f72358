"""Two engines of one process answer as each does while the other rests: neither has the other's scratch or streams."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gpu import needs_cuda
from tandem import LLM, SamplingParams
from tiny import VOCAB

pytestmark = [pytest.mark.gpu, needs_cuda]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ROUNDS, PROMPT = 6, 96
FLAGS = {"kt_cpuinfer": 2, "max_total_tokens": 4096, "disable_radix_cache": True}


@pytest.fixture
def engines(tiny_models) -> Iterator[list[LLM]]:
    path = Path(tiny_models["qwen3_moe-gpu"])
    made = [LLM(str(path), kt_gpu_experts_ratio=share, **FLAGS) for share in (0.5, 1.0)]
    yield made
    for llm in made:
        llm.engine.close()


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (PROMPT,), generator=generator).tolist() for _ in range(3)]


def answers(llm: LLM, seed: int) -> list[list[int]]:
    return [each.token_ids for each in llm.generate(prompts(seed), GREEDY, progress=False)]


def test_two_engines_at_once(engines) -> None:
    alone = [[answers(llm, seed) for seed in range(ROUNDS)] for llm in engines]
    with ThreadPoolExecutor(2) as pool:
        rounds = [pool.submit(lambda llm=llm: [answers(llm, seed) for seed in range(ROUNDS)]) for llm in engines]
        together = [each.result(timeout=120) for each in rounds]
    assert together == alone
