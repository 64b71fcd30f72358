"""Greedy answers of the whole engine in float32 equal Transformers' `generate` on the same directory: 20 prompts x 64
tokens, ours in one batch, theirs one by one. Theirs take two minutes on two cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem import LLM, SamplingParams

PROMPTS = [
    "What is the capital of France?", "Write a short poem about the sea.", "Why is the sky blue?",
    "Name three fruits.", "What is 12 times 12?", "Who was Ada Lovelace?", "Translate 'good morning' into Spanish.",
    "Tell me a joke about cats.", "How do I boil an egg?", "What does a compiler do?", "List the planets.",
    "Write a haiku about autumn.", "What is photosynthesis?", "Give me a title for a story about a lighthouse.",
    "Explain gravity to a child.", "Write a Python function that adds two numbers.", "What is the largest ocean?",
    "Summarise the plot of Hamlet in one sentence.", "ünïcödé ✓ 漢字?", "a",
]  # fmt: skip
TOKENS = 64


@pytest.fixture(scope="module")
def answers(demo_dir: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of our engine, all prompts in one batch."""
    model = LLM(str(demo_dir), dtype="float32", max_total_tokens=8192, max_running_requests=20)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    results = model.chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS], params)
    return [(result.prompt_ids, result.token_ids) for result in results]


@pytest.fixture(scope="module")
def theirs(demo_dir: Path):
    model = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as ignore_eos
    return model


def test_prompts_are_tokenised_as_transformers_does(demo_dir, answers) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    for prompt, (ids, _) in zip(PROMPTS, answers, strict=True):
        message = [{"role": "user", "content": prompt}]
        assert ids == tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_transformers_generates_the_same(theirs, answers, index: int) -> None:
    """The whole answer, through their cache and their loop."""
    prompt, answer = answers[index]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        generated = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=2
        )
    assert generated[0, len(prompt) :].tolist() == answer
