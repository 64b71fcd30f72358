"""The demo model in float32 beside Transformers' on the same directory: logits of a text, and whole greedy answers."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from scheduling import runs_full
from sessions import Session
from tandem import LLM, SamplingParams, _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Ops
from tandem.kernels.reference import TorchOps

PROMPTS = [
    "What is the capital of France?", "Write a short poem about the sea.", "Why is the sky blue?",
    "Name three fruits.", "What is 12 times 12?", "Who was Ada Lovelace?", "Translate 'good morning' into Spanish.",
    "Tell me a joke about cats.", "How do I boil an egg?", "What does a compiler do?", "List the planets.",
    "Write a haiku about autumn.", "What is photosynthesis?", "Give me a title for a story about a lighthouse.",
    "Explain gravity to a child.", "Write a Python function that adds two numbers.", "What is the largest ocean?",
    "Summarise the plot of Hamlet in one sentence.", "ünïcödé ✓ 漢字?", "a",
]  # fmt: skip
TOKENS, FULL_TOKENS = 32, 64  # of an answer
TORCH_TOKENS = 100  # of the text in plain torch, which takes many times as long
CHECK_TEXT = (files("tandem") / "data" / "demo" / "check.txt").read_text(encoding="utf-8")

Answer = tuple[list[int], list[int]]  # ids of the prompt, ids of the answer


@pytest.fixture(scope="module")
def check_ids(demo_dir: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(demo_dir / "tokenizer.json"))
    return tokenizer.encode(CHECK_TEXT, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def theirs(demo_dir: Path):
    model = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as ignore_eos
    return model


@pytest.fixture(scope="module")
def tokens(request: pytest.FixtureRequest) -> int:
    return FULL_TOKENS if runs_full(request.config) else TOKENS


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[str]:
    return PROMPTS if runs_full(request.config) else PROMPTS[::2]


@pytest.fixture(scope="module")
def answers(demo_dir: Path, asked: list[str], tokens: int) -> list[Answer]:
    """Of our engine, all prompts in one batch."""
    model = LLM(str(demo_dir), dtype="float32", max_total_tokens=8192, max_running_requests=20)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    results = model.chat([[{"role": "user", "content": prompt}] for prompt in asked], params)
    return [(result.prompt_ids, result.token_ids) for result in results]


def perplexity(logits: Tensor, ids: list[int]) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(ids[1:])).item())


def run(path: Path, dtype: str, ids: list[int], ops: Ops) -> Tensor:
    """Logits of `ids` in one step of our own model code."""
    return Session(path, dtype, pages=200, ops=ops).step([(0, ids)])[0]


def test_float32_perplexity_and_logits_equal_transformers(demo_dir, theirs, check_ids) -> None:
    """README of the demo model: 20.073 with Transformers in float32."""
    with torch.inference_mode():
        expected = theirs(torch.tensor([check_ids])).logits[0]
    assert perplexity(expected, check_ids) == pytest.approx(20.073, abs=0.001)
    core = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    ours = run(demo_dir, "float32", check_ids, core)
    assert perplexity(ours, check_ids) == pytest.approx(20.073, rel=1e-3)
    some = run(demo_dir, "float32", check_ids[:TORCH_TOKENS], TorchOps())
    for got in (ours, some):
        assert float((got - expected[: len(got)]).abs().max() / expected.abs().max()) < 1e-4


def test_bfloat16_perplexity(demo_dir, check_ids) -> None:
    ours = run(demo_dir, "bfloat16", check_ids, TorchOps())
    assert perplexity(ours, check_ids) == pytest.approx(20.11, rel=0.01)


def test_prompts_are_tokenised_as_transformers_does(demo_dir, asked, answers) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    for prompt, (ids, _) in zip(asked, answers, strict=True):
        message = [{"role": "user", "content": prompt}]
        assert ids == tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]


def test_each_token_is_the_best_of_transformers(theirs, answers, tokens) -> None:
    """After the prompt and all earlier tokens of ours: so their greedy answer is ours, whole. Rows are padded behind
    their end, which no token sees."""
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    rows = [(prompt + answer + [0] * longest)[:longest] for prompt, answer in answers]
    with torch.inference_mode():
        best = theirs(torch.tensor(rows)).logits.argmax(-1)
    for (prompt, answer), row in zip(answers, best, strict=True):
        assert len(answer) == tokens
        assert row[len(prompt) - 1 :][:tokens].tolist() == answer


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_transformers_generates_the_same(theirs, answers, tokens, index: int) -> None:
    """Through their cache and their loop, one by one."""
    prompt, answer = answers[index]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        generated = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=2
        )
    assert generated[0, len(prompt) :].tolist() == answer
