"""Answers of a model with tables of n-grams on a GPU: from snapshots, after preemption, with draft tokens.

The reference is the same model in float32 on the CPU; every expert is chosen, and every block of tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from draft_models import drafted
from gpu import needs_cuda
from gpu_sessions import check_answers
from tandem import LLM, SamplingParams
from tandem.errors import CheckpointError

pytestmark = [pytest.mark.gpu, needs_cuda]
FLAGS = {"device": "cuda", "kt_cpuinfer": 2, "kt_gpu_experts_ratio": 0.5, "max_running_requests": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
MANY = [list(range(40 + n, 81 + n)) for n in range(6)]
"""Nothing is shared, so four do not fit into 160 tokens."""


@pytest.mark.parametrize("where", ["ram", "map", "disk"])
@pytest.mark.parametrize("variant", ["qwen4_exp", "qwen4_exp-tables"])
def test_answers_from_snapshots_and_after_preemption(tiny_models, variant: str, where: str) -> None:
    """A sequence's last ids go with its snapshot: else n-grams behind a border would be others."""
    path = tiny_models.unchosen(variant)
    try:
        cached = LLM(str(path), **FLAGS, page_size=8, tables=where)
    except CheckpointError as error:
        pytest.skip(f"this file system does not read past the page cache: {error}")
    prompts = [list(range(40, 90))]
    answers = cached.generate(prompts, GREEDY)
    prompts.append([*prompts[0], *answers[0].token_ids, 7, 8, 9])
    answers += cached.generate(prompts[1:], GREEDY)
    assert answers[1].cached_tokens >= len(prompts[1]) - 3 - 2 * 8
    tight = LLM(str(path), **FLAGS, page_size=8, max_total_tokens=160, tables=where)
    answers += tight.generate(MANY, GREEDY)
    assert tight.engine.stats().preemptions > 0
    check_answers(path, [*prompts, *MANY], answers)


def test_glm_answers_from_snapshots(tiny_models) -> None:
    path = tiny_models.unchosen("glm5_next")
    cached, prompts = LLM(str(path), **FLAGS, page_size=8), [list(range(40, 90))]
    answers = cached.generate(prompts, GREEDY)
    prompts.append([*prompts[0], *answers[0].token_ids, 7, 8, 9])
    answers += cached.generate(prompts[1:], GREEDY)
    assert answers[1].cached_tokens >= len(prompts[1]) - 3 - 2 * 8
    check_answers(path, prompts, answers)


@pytest.fixture(scope="module")
def drafting(tiny_models, tmp_path_factory) -> Path:
    """With a draft layer."""
    return drafted(tiny_models.unchosen("qwen4_exp"), tmp_path_factory.mktemp("drafting") / "model").path


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
def test_answers_with_draft_tokens(drafting: Path, graphs: bool) -> None:
    """Accepted draft tokens and rejected ones: rows of n-grams, blocks of tokens and memories are those of what
    came."""
    flags = FLAGS | {"speculative_algorithm": "NEXTN", "disable_speculative_governor": True}
    llm = LLM(str(drafting), **flags, page_size=8, disable_cuda_graph=not graphs)
    prompts = [[7, 8, 9, 7, 8], [40] * 5, list(range(60, 65))]
    check_answers(drafting, prompts, llm.generate(prompts, GREEDY))
    assert llm.engine.stats().generated_tokens >= 36
