"""Families with states beside pages, through the engine: second turns, preemption, and Transformers' answers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from sessions import generated

VARIANTS_OF_FAMILIES = [
    "lfm2_moe", "lfm2_moe-bias", "granitemoehybrid", "granitemoehybrid-dense", "nemotron_h", "nemotron_h-mlp",
    "nemotron_h-latent", "kimi_linear", "kimi_linear-short", "bailing_hybrid", "bailing_hybrid-plain",
    "glm5_next", "glm5_next-pools", "qwen4_exp", "qwen4_exp-tables",
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS_OF_FAMILIES)
def test_second_turns_and_preempted_sequences_answer_alike(tiny_models, variant: str) -> None:
    """A turn that goes on where another ended finds its state; sequences that had to go come back."""
    g = torch.Generator().manual_seed(3)
    path, prompts = tiny_models[variant], torch.randint(256, (3, 30), generator=g).tolist()
    plain, none, _ = generated(path, [prompts], disable_radix_cache=True, max_total_tokens=400)
    longer = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, plain, strict=True)]
    calls = [prompts, longer]
    plain, none, _ = generated(path, calls, disable_radix_cache=True, max_total_tokens=400)
    cached, found, _ = generated(path, calls, max_total_tokens=400)
    tight, _, preempted = generated(path, calls, max_total_tokens=72, context_length=64, chunked_prefill_size=8)
    assert none == 0 and found >= 3 * 24 and preempted > 0
    assert cached == plain and tight == plain
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        for prompt, answer in zip([*prompts, *longer], plain, strict=True):
            scores = model(torch.tensor([prompt + answer])).logits[0]
            assert scores[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
